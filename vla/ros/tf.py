"""The tree of frames over time: where one stood in another at the moment a picture was taken, not "now" or "latest".

As tf2: transforms are kept for some seconds, translations interpolated in straight lines, rotations by slerp, and nothing is extrapolated.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from math import inf
from threading import Lock

from mmsdk.errors import InputError
from mmsdk.vla.ros.messages import Header, PoseStamped
from mmsdk.vla.ros.pose import IDENTITY, Rigid, rigid_of_pose, rigid_of_transform
from mmsdk.vla.ros.protocols import AnyPoseStamped, AnyTransformStamped
from mmsdk.vla.ros.stamps import SECOND, stamped, time_of

__all__ = ["TransformBuffer"]


@dataclass(slots=True)
class _Edge:
    """A frame in its parent, over time; of a static one only the newest counts, at any time."""

    parent: str
    static: bool
    times: list[int] = field(default_factory=list)
    poses: list[Rigid] = field(default_factory=list)

    def add(self, moment: int, pose: Rigid, keep: int) -> None:
        """In order of time; of two at one moment the first stays, as in tf2. Those older than `keep` before the newest leave."""
        place = bisect_left(self.times, moment)
        if place < len(self.times) and self.times[place] == moment:
            return
        self.times.insert(place, moment)
        self.poses.insert(place, pose)
        stays = bisect_left(self.times, self.times[-1] - keep)
        del self.times[:stays], self.poses[:stays]

    def at(self, moment: int, child: str) -> Rigid:
        """Raises InputError where the moment lies outside of what is known."""
        if self.static:
            return self.poses[-1]
        first, last = self.times[0], self.times[-1]
        if not first <= moment <= last:
            side, gap = ("before the first", first - moment) if moment < first else ("after the last", moment - last)
            told = f"asked for {gap / SECOND:.3f} s {side} transform that is known; nothing is extrapolated"
            raise InputError(told, item=f"{child} in {self.parent}")
        after = bisect_right(self.times, moment)
        if self.times[after - 1] == moment:
            return self.poses[after - 1]
        start, end = self.times[after - 1], self.times[after]
        return self.poses[after - 1].towards(self.poses[after], (moment - start) / (end - start))


class TransformBuffer:
    """Keeps the last `keep` seconds of every transform that it is given. It may be used from any thread."""

    def __init__(self, keep: float = 10.0) -> None:
        """Raises InputError unless `keep` is a number of seconds above 0."""
        if not 0 < keep * SECOND < inf:
            raise InputError(f"{keep} s is no time to keep transforms for", item="tf")
        self._keep = round(keep * SECOND)
        self._edges: dict[str, _Edge] = {}
        self._lock = Lock()

    def take(self, message: AnyTransformStamped, static: bool = False) -> None:
        """Take in one transform of /tf, or of /tf_static.

        Raises InputError for frames without a name, with a leading slash, inside of themselves, with a second parent, once static and once
        not; for what is not finite, no rotation, not stamped (static ones need no stamp), or older than all that is kept.
        """
        parent, child = message.header.frame_id, message.child_frame_id
        item = f"{child or '(no name)'} in {parent or '(no name)'}"
        pose = rigid_of_transform(message.transform, item)
        moment = 0 if static else stamped(message.header.stamp, item)
        with self._lock:
            self._keep_one(parent, child, moment, pose, static)

    def lookup(self, target: str, source: str, moment: int) -> Rigid:
        """Takes coordinates in the frame `source` to those in `target`, at a moment in nanoseconds of ROS time.

        Raises InputError for a moment of 0 (tf2's "latest": name the picture's stamp), unknown frames, frames in two trees, and a moment
        outside of what is known of one of the frames on the way.
        """
        if moment <= 0:
            raise InputError("asked for no moment; name the stamp of what is looked at", item=f"{source} in {target}")
        with self._lock:
            return self._found(target, source, moment)

    def moved(self, pose: AnyPoseStamped, target: str) -> PoseStamped:
        """A pose in another frame, at the pose's own stamp. Raises InputError as `lookup` does, and for a pose that is none."""
        moment = stamped(pose.header.stamp, "pose")
        motion = self.lookup(target, pose.header.frame_id, moment)
        return PoseStamped(Header(time_of(moment), target), motion.after(rigid_of_pose(pose.pose)).pose())

    def clear(self) -> None:
        """Forget what moves: the clock has gone back. Static transforms stay, for they are not sent again."""
        with self._lock:
            self._edges = {child: edge for child, edge in self._edges.items() if edge.static}

    def _keep_one(self, parent: str, child: str, moment: int, pose: Rigid, static: bool) -> None:
        item = f"{child or '(no name)'} in {parent or '(no name)'}"
        edge = self._edges.get(child)
        if edge is None:
            self._check_new(parent, child, item)
            edge = _Edge(parent, static)
        elif edge.parent != parent or edge.static != static:
            was = f"{'static' if edge.static else 'moving'} in {edge.parent}"
            raise InputError(f"{child} was {was}, now it is {'static' if static else 'moving'} in {parent}", item=item)
        if static:
            edge.times, edge.poses = [moment], [pose]
        elif edge.times and moment < edge.times[-1] - self._keep:
            raise InputError(f"is {(edge.times[-1] - moment) / SECOND:.3f} s older than the newest", item=item)
        else:
            edge.add(moment, pose, self._keep)
        self._edges[child] = edge

    def _found(self, target: str, source: str, moment: int) -> Rigid:
        item = f"{source} in {target}"
        known = {*self._edges, *(edge.parent for edge in self._edges.values())}
        for frame in (target, source):
            if frame not in known:
                raise InputError(f"there is no frame {frame!r}; there is {', '.join(sorted(known)) or 'none'}", item=item)
        up, down = self._ancestors(source), self._ancestors(target)
        shared = next((frame for frame in up if frame in down), None)
        if shared is None:
            raise InputError(f"they are in two trees, under {up[-1]} and {down[-1]}", item=item)
        there, back = self._below(shared, up, moment), self._below(shared, down, moment)
        return back.inverse().after(there)

    def _check_new(self, parent: str, child: str, item: str) -> None:
        if not parent or not child or "/" in (parent[:1], child[:1]):
            raise InputError("frames have names, which begin with no slash", item=item)
        if child in self._ancestors(parent):
            raise InputError(f"{parent} already stands in {child}", item=item)

    def _ancestors(self, frame: str) -> list[str]:
        """The frame itself, its parent, and so on; there are no loops, because none is taken in."""
        way = [frame]
        while way[-1] in self._edges:
            way.append(self._edges[way[-1]].parent)
        return way

    def _below(self, top: str, way: list[str], moment: int) -> Rigid:
        """The first frame of a way in the frame `top`, which is on it."""
        pose = IDENTITY
        for frame in way[: way.index(top)]:
            pose = self._edges[frame].at(moment, frame).after(pose)
        return pose
