"""Data sets to fine-tune on: their rows, the tokens and labels of a row, and sequences of one length packed of them."""
