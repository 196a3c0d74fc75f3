"""A board image whose lanes are decoded when they are first read."""

from __future__ import annotations

from stallwatch.board import decode
from stallwatch.board.columns import Kept, Survey
from stallwatch.board.glance import Glance
from stallwatch.board.image import BoardImage, LaneImage


class SeenBoard(BoardImage):
    """What the reader returns. Any thread may read it: all that lanes are made of is immutable."""

    __slots__ = ("kept", "survey")

    survey: Survey
    kept: Kept

    @classmethod
    def make(cls, survey: Survey, kept: Kept, **fields: object) -> SeenBoard:
        """Every field of BoardImage but the lanes."""
        self = cls.__new__(cls)
        for name, value in ("survey", survey), ("kept", kept), *fields.items():
            object.__setattr__(self, name, value)
        return self

    def at(self, taken_ns: int) -> SeenBoard:
        """The same board at a later look, at which nothing had moved."""
        return self.make(
            self.survey._replace(moved=()), self.kept, incarnation=self.incarnation,
            taken_ns=taken_ns, processes=self.processes, moving=(), problems=self.problems,
        )  # fmt: skip

    def lane_at(self, place: int) -> LaneImage:
        """One lane of `lanes`, without the others."""
        outline = self.survey.lineup.outlines[place]
        apart = self.kept.apart.get(outline.who.slot)
        if apart is not None:
            return apart.image
        return decode.lane(
            outline.who, outline.meanings, self.kept.raws[place],
            beats=self.kept.beats[place], now=self.taken_ns,
        )  # fmt: skip

    def __getattr__(self, name: str) -> object:
        # Only reached while the slot of that name is empty: the constructor, and with it replace(),
        # fills `lanes`, and make() all the others.
        found: object
        if name == "lanes":
            found = tuple(self.lane_at(place) for place in range(len(self.survey.works)))
        elif name == "survey":
            found = Survey.of([Glance.of(lane) for lane in self.lanes])
        elif name == "kept":
            glances = {lane.slot: Glance.of(lane) for lane in self.lanes}
            found = Kept((), (), glances)
        else:
            raise AttributeError(name)
        object.__setattr__(self, name, found)
        return found


def survey(image: BoardImage) -> Survey:
    """All lanes of any board image, as cheap as they can be had."""
    if isinstance(image, SeenBoard):
        return image.survey
    return Survey.of([Glance.of(lane) for lane in image.lanes])


def lane_at(image: BoardImage, place: int) -> LaneImage:
    """One lane of an image, by its place in the survey."""
    if isinstance(image, SeenBoard):
        return image.lane_at(place)
    return image.lanes[place]
