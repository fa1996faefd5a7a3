"""The process that starts the ranks of a command. Python warns if it runs a file that its package has imported."""

from shardlite.cli.launch import run_launcher

if __name__ == "__main__":
    run_launcher()
