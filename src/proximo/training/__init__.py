"""The loop and what it is made of: collect, assemble, learn, evaluate, write down."""
