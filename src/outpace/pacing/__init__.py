"""How many tokens a cycle drafts, by what they cost and how many are accepted."""
