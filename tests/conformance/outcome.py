"""What a suite found."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """The figures of one suite."""

    suite: str
    passed: int = 0
    explained: dict[str, str] = field(default_factory=dict)
    """Cases that come out otherwise than the suite wants, and why that is meant."""
    aside: int = 0
    """Cases that ask for settings that only the suite's own server has."""
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        total = self.passed + len(self.explained) + len(self.failed)
        lines = [
            f"{self.suite}: {self.passed} of {total}, {len(self.explained)} meant otherwise, {self.aside} left aside"
        ]
        lines += [f"    {note}" for note in self.notes]
        lines += [f"    meant: {name}: {why}" for name, why in self.explained.items()]
        lines += [f"    FAILED: {line}" for line in self.failed]
        return "\n".join(lines)
