"""tunesmith: fine-tuning of language models from YAML, whose heart is GPU memory.

Import ladder (a room may import those to its right): cli > report, convert > run > build > memory > schema.
`compose` and `check` stand beside `cli`; `errors` imports nothing. No front room loads torch.
"""
