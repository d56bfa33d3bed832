"""Checks with a loaded model: do model, tokenizer, task and algorithm work together?"""
