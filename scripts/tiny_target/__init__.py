"""Parts of the embedded tiny target: the chats it learns from, its tokenizer, its model and its answers."""
