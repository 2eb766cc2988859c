"""Dollars and token estimates, from genai-prices' offline table. An unknown model has no price; the
run goes on.
"""

from __future__ import annotations

from genai_prices import Usage as PriceUsage
from genai_prices import calc_price

from agent.models.base import Estimate, Prompt, Usage

CHARS_PER_TOKEN = (
    3.2  # code tokenises to 3.2 to 3.8 characters a token; the low end makes an upper bound
)


def dollars(usage: Usage, model: str, provider: str) -> float | None:
    """Price of a call, or None for a model or a local server without a known price."""
    counted = PriceUsage(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cache_read_tokens,
        cache_write_tokens=usage.cache_write_tokens,
    )
    try:
        return float(calc_price(counted, model_ref=model, provider_id=provider).total_price)
    except LookupError:
        return None


def estimate(prompt: Prompt, model: str, provider: str) -> Estimate:
    """Upper bound before the call: the whole prompt uncached and an answer of full length."""
    used = Usage(guess(prompt, "").input_tokens, prompt.max_output_tokens)
    return Estimate(used.total, dollars(used, model, provider))


def guess(prompt: Prompt, answer: str) -> Usage:
    """Tokens by the length of what was sent and received, where the provider does not say."""
    characters = len(prompt.stable) + len(prompt.body) + sum(len(t.text) for t in prompt.turns)
    return Usage(int(characters / CHARS_PER_TOKEN) + 1, int(len(answer) / CHARS_PER_TOKEN))
