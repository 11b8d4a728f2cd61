"""What a tuning found out about derived drafts, kept beside each of them."""

from __future__ import annotations

from specllama.base.disk import checksum
from specllama.pairs import derived as drafts
from specllama.pairs.derived import Measurement
from specllama.pairs.profile import Profile, ProfileKey
from specllama.tuning import tune as tuner
from specllama.tuning.findings import Findings


def keep(subject: ProfileKey, found: Findings, profile: Profile) -> None:
    """Keep what each derived draft was worth; one that went meanwhile is left alone. Raises ConfigError, DiskFull."""
    own, *others = tuner.judged(found, profile)
    for each in others:
        derived = None if each.path is None or not each.path.is_file() else drafts.read(each.path)
        if derived is None:
            continue
        has_own = subject.draft is not None and derived.parent.path == subject.draft.resolve()
        measurement = Measurement(
            target=subject.target.name,
            target_sha256=checksum(subject.target),
            cpu=drafts.cpu_here(),
            made=profile.made,
            step_s=profile.step_s,
            cost=each.cost,
            speed=each.speed,
            parent_cost=own.cost if has_own else None,
            parent_speed=own.speed if has_own else None,
            classes=each.classes,
            by=drafts.TUNE,
        )
        drafts.measured(derived, measurement)
