"""Many machines: compile and judge jobs done by workers elsewhere, behind the protocols of `sandbox.jobs`.

    station   what a worker does on its node: the same confined compile and judge processes as everywhere
    parcel    messages: jobs, artifacts and verdicts as plain bytes, artifacts by content hash
    keys      content addresses of results; results: results on the driver's disk by key
    places    which workers a cluster's nodes get; address: what `--workers` says
    transport what a cluster must offer; ray_cluster: on Ray, the only module that imports it; fake_cluster: threads
    roster    who is there: states, heartbeats, quarantine; pool: who does what, retries
    clients   `Compiler` and `Judge` on a pool; farm: all of it started from one line

A worker is trusted as far as its machine is: this guards against machines that fail, not against machines that lie.
Candidates reach workers as data and meet only the confined processes there.
"""
