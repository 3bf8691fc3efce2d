"""Questions of serving: what the commands of ``plan serve`` show."""
