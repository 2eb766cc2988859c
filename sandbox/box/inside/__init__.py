"""Files that run inside a box or on its way in: each one alone, standard library only, never importing the project."""
