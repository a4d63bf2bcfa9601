"""The processes of one run: joining them, comparing what they run, and speaking with one voice."""
