"""The cheapest way to divide a network in two: a minimum cut, by Dinic's maximum flow (1970), in whole numbers."""

from collections import deque

SOURCE, SINK = 0, 1
NEVER = 1 << 30
"""Costs more than all else together: such an edge is never cut."""


class Cut:
    """Vertices are numbers; 0 is always on the one side, 1 on the other."""

    def __init__(self) -> None:
        self._heads: list[int] = []
        self._room: list[int] = []
        self._edges: list[list[int]] = [[], []]

    def vertex(self) -> int:
        """A new one."""
        self._edges.append([])
        return len(self._edges) - 1

    def charge(self, before: int, after: int, cost: int = 1) -> None:
        """What it costs if ``before`` is on the source's side and ``after`` is not."""
        for start, end, room in ((before, after, cost), (after, before, 0)):
            self._edges[start].append(len(self._heads))
            self._heads.append(end)
            self._room.append(room)

    def source_side(self) -> frozenset[int]:
        """The smallest set of vertices beside the source with which the division costs least."""
        while SINK in (depths := self._depths()):
            unseen = [0] * len(self._edges)
            while self._push(depths, unseen):
                pass
        return frozenset(depths)

    def _depths(self) -> dict[int, int]:
        """Vertices that can still be reached from the source, with their distance."""
        depths, queue = {SOURCE: 0}, deque([SOURCE])
        while queue:
            vertex = queue.popleft()
            for edge in self._edges[vertex]:
                if self._room[edge] and self._heads[edge] not in depths:
                    depths[self._heads[edge]] = depths[vertex] + 1
                    queue.append(self._heads[edge])
        return depths

    def _push(self, depths: dict[int, int], unseen: list[int]) -> bool:
        """Send as much as fits along one shortest way to the sink; false if there is none."""
        way: list[int] = []
        vertex = SOURCE
        while vertex != SINK:
            if unseen[vertex] < len(self._edges[vertex]):
                edge = self._edges[vertex][unseen[vertex]]
                end = self._heads[edge]
                if self._room[edge] and depths.get(end) == depths[vertex] + 1:
                    way.append(edge)
                    vertex = end
                else:
                    unseen[vertex] += 1
            elif way:
                vertex = self._heads[way.pop() ^ 1]
                unseen[vertex] += 1
            else:
                return False
        amount = min(self._room[edge] for edge in way)
        for edge in way:
            self._room[edge] -= amount
            self._room[edge ^ 1] += amount
        return True

    def beside_sink(self) -> frozenset[int]:
        """Vertices that hang together with the sink, whatever the direction of charges, without passing the source."""
        found, queue = {SINK}, deque([SINK])
        while queue:
            for edge in self._edges[queue.popleft()]:
                if (head := self._heads[edge]) not in found and head != SOURCE:
                    found.add(head)
                    queue.append(head)
        return frozenset(found)
