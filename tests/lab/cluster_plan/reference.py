"""The same simulation, one event at a time: a heap of requests and a loop. Slow, and shares no code with the other."""

import heapq
import math
from bisect import insort
from collections import deque


def simulated(engines, learner, work, rule, lengths, *, steps):
    """When each step's update ended, the staleness of each trained group, and the groups that each step trained."""
    now = clock = context = resumes = 0.0
    live, queue, left, born, ready, due = [], deque(), {}, {}, [], set()
    version = issued = taken = 0
    doing = None
    ends, staleness, trained = [], [], [[]]

    def stall(seconds):
        nonlocal resumes
        resumes = max(now, resumes) + seconds

    def admits():
        """Whether the first request that waits may begin."""
        if not queue or len(live) == engines.slots * engines.number:
            return False
        return not (rule.drained and live and queue[0][1] // work.groups != live[0][1] // work.groups)

    def admit():
        nonlocal context
        length, group = queue.popleft()
        heapq.heappush(live, (clock + length, group, length))
        context += work.prompt_tokens
        if group not in born:
            born[group] = version
            stall(work.prompt_tokens * engines.prefill / engines.number)

    def issue():
        nonlocal issued, due
        limit = rule.limit(version, work.groups)
        for group in range(issued, limit):
            left[group] = work.group_size
            queue.extend((float(length), group) for length in lengths[group])
        issued = limit
        due = {group for group in left if group < rule.due(version, work.groups)}

    def began(group):
        return max(0, group // work.groups - rule.depth) if rule.drained else born[group]

    def step():
        shared = min(engines.number, len(live))
        each = engines.base + (engines.per_request * len(live) + engines.per_token * context) / shared
        return each, engines.per_token * len(live) / shared

    issue()
    while version < steps:
        size = work.groups // learner.chunks
        if doing is None and len(ready) >= size and work.groups - taken - size >= len(due):
            chosen, ready = ready[:size], ready[size:]
            taken += size
            trained[-1] += chosen
            staleness += [version - began(group) for group in chosen]
            tokens = sum(float(lengths[group].sum()) + work.prompt_tokens for group in chosen)
            doing = ("update", now + learner.fixed / learner.chunks + learner.per_token * tokens)
        until = math.inf if doing is None else doing[1]
        ended = math.inf
        if live:
            each, growth = step()
            distance = live[0][0] - clock
            ended = max(now, resumes) + distance * (each + growth * distance / 2)
        # One begins when engines stand still for nothing else: after a push, and after the prompt of the one before.
        begins = max(now, resumes) if admits() else math.inf
        assert min(until, ended, begins) < math.inf
        if begins < ended and begins <= until:
            now = begins
            admit()
            continue
        if ended <= until:
            end, group, length = heapq.heappop(live)
            context += (end - clock) * (len(live) + 1) - length - work.prompt_tokens
            now, clock = ended, end
            left[group] -= 1
            if not left[group]:
                del left[group]
                due.discard(group)
                insort(ready, group)
            continue
        seconds = until - max(now, resumes)
        if live and seconds > 0:
            each, growth = step()
            moved = 2 * seconds / (each + math.sqrt(each**2 + 2 * growth * seconds))
            clock += moved
            context += moved * len(live)
        now = until
        assert doing is not None
        kind, doing = doing[0], None
        if kind == "update" and taken == work.groups:
            ends.append(now)
            stall(work.push)
            if work.recompute:
                stall(context * engines.prefill / engines.number)
            # New groups are issued with the new version, and begin when the push is over.
            version, taken = version + 1, 0
            trained.append([])
            doing = ("push", now + work.push)
            if version < steps:
                issue()
    return ends, staleness, trained[:-1]
