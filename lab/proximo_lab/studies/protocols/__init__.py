"""Courses: what a run of a study does where it is more than training by one config."""
