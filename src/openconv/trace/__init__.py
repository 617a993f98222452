"""``openconv trace``: what an engine's blocks load, multiply and store, step by step, and a page that shows it."""
