"""What a run needs and costs, before it runs: `python -m jaxseek.plan`."""
