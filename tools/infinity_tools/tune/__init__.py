"""`infinity tune`: find the fastest settings for a model on this machine by short training trials."""
