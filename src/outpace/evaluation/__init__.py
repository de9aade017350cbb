"""Evaluation of methods: tasks, protocols, scoring, reports."""
