"""Slow or stuck by the clock alone: literal signs at literal times."""

from hangdoctor.watch.liveness import Judgement, Limits, Signs, follow, judge_liveness


def tracks_of(*polls):
    """Return the tracks after polls of the form (now, signs, signs, ...)."""
    tracks = {}
    for now, *seen in polls:
        tracks = follow(tracks, seen, now)
    return tracks


def beating(name, step, alive=True, done=False):
    return Signs(name, alive, step, float(step), done)


def test_silence_is_measured_against_the_longest_pause_between_beats():
    tracks = tracks_of(*((30 * step, beating("rank_0", step)) for step in range(5)))
    assert judge_liveness(tracks, 120 + 149, Limits()) == Judgement("moving", (), 149, 150)
    assert judge_liveness(tracks, 120 + 151, Limits()) == Judgement("quiet", ("rank_0",), 151, 150)


def test_collection_comes_in_time_before_the_watchdog():
    tracks = tracks_of(*((200 * step, beating("rank_0", step)) for step in range(3)))
    assert judge_liveness(tracks, 400 + 301, Limits(watchdog_s=600)) == Judgement(
        "quiet", ("rank_0",), 301, 300
    )


def test_one_silent_rank_among_beating_ones_is_enough():
    tracks = tracks_of(
        (0, beating("rank_0", 0), beating("rank_1", 0)), (8, beating("rank_0", 1), beating("rank_1", 0))
    )
    assert judge_liveness(tracks, 11, Limits(quiet_s=10)) == Judgement("quiet", ("rank_1",), 11, 10)


def test_first_step_gets_half_the_watchdogs_time():
    tracks = tracks_of((0, beating("rank_0", 0)))
    assert judge_liveness(tracks, 299, Limits()) == Judgement("starting", (), 299, 300)
    assert judge_liveness(tracks, 301, Limits()).state == "quiet"
    assert judge_liveness(tracks, 31, Limits(quiet_s=30)).state == "quiet"  # what was asked for holds


def test_without_beats_one_growing_log_is_enough_to_be_alive():
    def look(size):
        return Signs("rank_0", True, log_bytes=size), Signs("rank_1", True, log_bytes=0)

    tracks = tracks_of((0, *look(10)), (50, *look(20)))
    assert judge_liveness(tracks, 55, Limits(quiet_s=10)).state == "moving"
    assert judge_liveness(tracks, 61, Limits(quiet_s=10)).state == "quiet"


def test_cpu_time_counts_only_without_a_better_sign():
    def looks(*signs):
        return judge_liveness(tracks_of(*enumerate_by_ten(signs)), 50, Limits(quiet_s=15)).state

    busy = [Signs("rank_0", True, cpu_s=4.0 * look) for look in range(6)]
    idle = [*busy[:3], *(Signs("rank_0", True, cpu_s=8.1 + 0.3 * look) for look in range(3))]
    spinning = [Signs("rank_0", True, 4, float(min(look, 2)), cpu_s=10.0 * look) for look in range(6)]
    assert looks(*busy) == "moving"
    assert looks(*idle) == "quiet"
    assert looks(*spinning) == "quiet"


def enumerate_by_ten(signs):
    """Return one poll every ten seconds."""
    return [(10 * look, one) for look, one in enumerate(signs)]


def test_gpus_that_draw_the_same_power_are_quiet_though_the_host_spins():
    def looks(*watts):
        signs = [
            Signs("rank_0", True, gpu_watts=drawn, cpu_s=10.0 * look) for look, drawn in enumerate(watts)
        ]
        return judge_liveness(
            tracks_of(*enumerate_by_ten(signs)), 10 * len(watts) - 10, Limits(quiet_s=25)
        ).state

    assert looks(600, 500, 610, 480, 600, 500) == "moving"
    assert looks(600, 500, 121, 122, 121, 120) == "quiet"


def test_job_whose_ranks_are_all_done_is_not_quiet():
    tracks = tracks_of((0, beating("rank_0", 4, done=True)))
    assert judge_liveness(tracks, 1000, Limits(quiet_s=10)).state == "moving"
