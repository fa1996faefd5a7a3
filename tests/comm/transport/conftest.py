"""What tests of several transports share."""

from contextlib import closing

import pytest

from tests.support.ranks.cluster import Cluster


@pytest.fixture(scope="module")
def throwaway(fork_server):
    """A cluster for bodies that break connections or ranks, or make groups: the session's stays as it is."""
    with closing(Cluster(fork_server, sizes=[2, 3, 4])) as gloo:
        yield gloo
