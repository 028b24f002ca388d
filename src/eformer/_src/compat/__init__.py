"""The documented API where it differs from the good way. Public packages offer it; no other file knows of it."""
