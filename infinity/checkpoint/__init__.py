"""Commits: what they hold, how they are published, and how a run resumes from one."""
