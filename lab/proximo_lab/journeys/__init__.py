"""Journeys of new users, repeated in a fresh environment: `python -m proximo_lab.journeys` writes docs/journeys.md.

A journey has goals. For each goal a user who has files of his own types commands and writes lines of code; a goal is
reached where he sees what he needs with no more of both than would be excellent.
"""
