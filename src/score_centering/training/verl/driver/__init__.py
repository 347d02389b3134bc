"""What runs in the process that the user starts: settings, Ray, the run loop's calls on workers and servers."""
