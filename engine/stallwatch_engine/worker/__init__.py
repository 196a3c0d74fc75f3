"""The worker process: scheduler, executor and what connects them with the api."""
