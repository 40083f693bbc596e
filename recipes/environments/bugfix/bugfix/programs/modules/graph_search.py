"""Paths in graphs: a dictionary of each node's neighbours and their distances.

>>> graph = {"a": {"b": 1, "c": 5}, "b": {"c": 2, "d": 7}, "c": {"d": 1}, "d": {}}
>>> distances(graph, "a")
{'a': 0, 'b': 1, 'c': 3, 'd': 4}
>>> distances(graph, "c")
{'c': 0, 'd': 1}
>>> shortest_path(graph, "a", "d")
['a', 'b', 'c', 'd']
>>> shortest_path(graph, "d", "a")
>>> shortest_path(graph, "b", "b")
['b']
>>> hops(graph, "a", "d")
2
>>> hops(graph, "a", "a")
0
>>> hops(graph, "d", "a")
-1

>>> order({"shirt": ["tie"], "tie": ["jacket"], "jacket": [], "belt": ["jacket"]})
['belt', 'shirt', 'tie', 'jacket']
>>> order({"a": ["b"], "b": ["a"]})
ValueError
>>> order({})
[]

>>> components({1: [2], 2: [1], 3: [], 4: [5], 5: [4]})
[[1, 2], [3], [4, 5]]
>>> components({})
[]
>>> components({1: [2], 2: [1, 3], 3: [2]})
[[1, 2, 3]]
"""

import heapq


def distances(graph, start):
    """The least distance from ``start`` to each node that can be reached."""
    found = {}
    waiting = [(0, start)]
    while waiting:
        distance, node = heapq.heappop(waiting)
        if node in found:
            continue
        found[node] = distance
        for neighbour, length in graph[node].items():
            if neighbour not in found:
                heapq.heappush(waiting, (distance + length, neighbour))
    return found


def shortest_path(graph, start, goal):
    """The nodes of the shortest way, or None."""
    waiting = [(0, [start])]
    seen = set()
    while waiting:
        distance, path = heapq.heappop(waiting)
        node = path[-1]
        if node == goal:
            return path
        if node in seen:
            continue
        seen.add(node)
        for neighbour, length in graph[node].items():
            heapq.heappush(waiting, (distance + length, [*path, neighbour]))
    return None


def hops(graph, start, goal):
    """How few edges lead from one node to another; -1 if none do."""
    level = [start]
    seen = {start}
    count = 0
    while level:
        if goal in level:
            return count
        following = []
        for node in level:
            for neighbour in graph[node]:
                if neighbour not in seen:
                    seen.add(neighbour)
                    following.append(neighbour)
        level = following
        count += 1
    return -1


def order(after):
    """All nodes, each before those that come after it; alphabetical where both are possible."""
    waiting = {node: 0 for node in after}
    for following in after.values():
        for node in following:
            waiting[node] += 1
    ready = sorted(node for node in after if waiting[node] == 0)
    done = []
    while ready:
        node = ready.pop(0)
        done.append(node)
        for following in after[node]:
            waiting[following] -= 1
            if waiting[following] == 0:
                ready.append(following)
        ready.sort()
    if len(done) < len(after):
        raise ValueError("there is a cycle")
    return done


def components(graph):
    """The sorted groups of nodes that are connected."""
    groups = []
    seen = set()
    for start in sorted(graph):
        if start in seen:
            continue
        group = []
        stack = [start]
        seen.add(start)
        while stack:
            node = stack.pop()
            group.append(node)
            for neighbour in graph[node]:
                if neighbour not in seen:
                    seen.add(neighbour)
                    stack.append(neighbour)
        groups.append(sorted(group))
    return groups
