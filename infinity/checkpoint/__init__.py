"""Commits: what they hold, how they are published, how a run goes on from one, and how one leaves for other formats."""
