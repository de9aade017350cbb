"""What measures methods and servers: tasks, protocols, scoring, load, figures of papers."""
