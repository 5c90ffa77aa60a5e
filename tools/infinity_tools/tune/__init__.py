"""`infinity tune`: which settings train this model fastest on this machine? Found by short training with each."""
