//! Applies the rule to the small world of `simulation.rs`.
#![allow(clippy::unwrap_used, clippy::cast_precision_loss, clippy::cast_possible_truncation)]

use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use super::simulation::{STEP, World, best_maximum};
use super::tuning::*;
use crate::data_path::worker::worker_options::WorkerId;

/// In a small world, queues must stop moving within this many steps.
const SOON: usize = 300;
/// No queue may move during this many further steps.
const LONG: usize = 1_000;
/// The highest demand that the rule may leave. It exceeds `best`, because queues stay on a worker that is not busy, and
/// stay if the gain is small.
fn allowed(workers: u32, best: f64) -> f64 {
    // A state in which no single move helps has a maximum of at most 2 - 2 / (workers + 1) times the best one (Finn and
    // Horowitz, 1979).
    let price = 2.0 - 2.0 / (f64::from(workers) + 1.0);
    (price * best).max(BUSY) + MARGIN
}

fn highest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

#[test]
fn four_equal_queues_on_one_of_two_workers_end_up_two_and_two() {
    let mut world = World::new(2, &[0.4; 4]);
    world.run(SOON);
    let places = world.places();
    assert_eq!(places.iter().filter(|&&place| place == 1).count(), 2, "{places:?}");
    assert!(world.run(LONG).is_empty());
}

#[test]
fn worker_that_is_not_busy_keeps_its_queues() {
    let mut world = World::new(4, &[0.05; 10]);
    assert_eq!(world.run(LONG), []);
}

#[test]
fn difference_below_the_margin_moves_nothing() {
    let mut world = World::new(2, &[0.41, 0.41, 0.05, 0.70]).placed(&[0, 0, 0, 1]);
    assert_eq!(world.run(LONG), []);
}

#[test]
fn load_that_lasts_less_than_the_patience_moves_nothing() {
    let mut world = World::new(2, &[0.01; 4]);
    world.run(20);
    for _ in 0..50 {
        world.queues.iter_mut().for_each(|queue| queue.demand = 0.4);
        assert_eq!(world.run(2), []);
        world.queues.iter_mut().for_each(|queue| queue.demand = 0.01);
        assert_eq!(world.run(30), []);
    }
}

#[test]
fn first_move_comes_after_exactly_the_patience() {
    let mut world = World::new(2, &[0.4; 4]);
    let quiet = (0..PATIENCE - 1).all(|_| world.step().is_empty());
    assert!(quiet);
    assert!(!world.step().is_empty());
}

#[test]
fn noise_of_a_fifth_moves_nothing_between_even_workers() {
    for seed in 0..20 {
        let mut world = World::new(2, &[0.1; 14]).placed(&[0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1]);
        world.noise = 0.2;
        world.random = fastrand::Rng::with_seed(seed);
        assert_eq!(world.run(LONG), [], "seed {seed}");
    }
}

#[test]
fn two_queues_that_exceed_a_worker_beside_a_third_come_to_rest() {
    for third in 1..=10 {
        let mut world = World::new(2, &[0.7, 0.7, f64::from(third) / 10.0]).placed(&[0, 0, 1]);
        world.noise = 0.1;
        let first = world.run(SOON).len();
        assert!(first <= 2, "third queue {third}/10: {first} moves");
        assert_eq!(world.run(LONG), [], "third queue {third}/10");
    }
}

#[test]
fn three_hungry_queues_on_two_workers_stay() {
    let mut world = World::new(2, &[5.0, 5.0, 5.0]).placed(&[0, 0, 1]);
    assert_eq!(world.run(LONG), []);
}

#[test]
fn hungry_queues_end_up_in_even_numbers_though_both_workers_are_full() {
    let places: Vec<u32> = (0..40).map(|queue| u32::from(queue >= 36)).collect();
    let mut world = World::new(2, &[1.0; 40]).placed(&places);
    world.run(SOON);
    let second = world.places().iter().filter(|&&place| place == 1).count();
    assert!((18..=22).contains(&second), "{second} of 40 on the second worker");
    assert_eq!(world.run(LONG), []);
}

#[test]
fn the_others_are_moved_away_from_a_heavy_queue_which_stays() {
    let mut world = World::new(2, &[5.0, 0.02, 0.02, 0.02]);
    world.run(SOON);
    assert_eq!(world.places(), [0, 1, 1, 1]);
    assert_eq!(world.run(LONG), []);
}

#[test]
fn queue_that_sends_next_to_nothing_is_not_moved_out_of_a_crowd() {
    let mut world = World::new(2, &[5.0, 0.000_01]);
    assert_eq!(world.run(LONG), []);
}

#[test]
fn worker_that_handles_completions_gets_less_to_submit() {
    let mut world = World::new(2, &[0.1; 12]);
    world.completions = Some((WorkerId(0), 0.5));
    world.run(SOON);
    // Submissions need 1.2 CPUs and completions 0.6, so an even split is 0.9 for each worker.
    let demands = world.demands();
    assert!((0.2..=0.4).contains(&demands[0]), "{demands:?}");
    assert_eq!(world.run(LONG), []);
}

#[test]
fn worker_that_gets_a_third_of_a_cpu_gets_a_smaller_part_of_the_queues() {
    let mut world = World::new(2, &[0.1; 10]).placed(&[0, 1, 0, 1, 0, 1, 0, 1, 0, 1]);
    world.workers[0].quota = 1.0 / 3.0;
    world.run(SOON);
    let demands = world.demands();
    assert!(demands[0] <= 0.31 && demands[1] >= 0.69, "{demands:?}");
    assert_eq!(world.run(LONG), []);
}

#[test]
fn worker_beside_a_busy_program_gives_queues_away() {
    let mut world = World::new(2, &[0.2; 6]).placed(&[0, 1, 0, 1, 0, 1]);
    world.cpus[0] = 0.5;
    world.run(SOON);
    let demands = world.demands();
    assert!(demands[0] < 0.5, "{demands:?}");
}

#[test]
fn two_workers_on_the_same_cpu_exchange_nothing() {
    let mut world = World::new(2, &[0.3; 6]);
    world.workers[1].cpu = 0;
    world.cpus.truncate(1);
    assert_eq!(world.run(LONG), []);
}

#[test]
fn two_workers_on_the_same_cpu_give_to_the_one_that_has_its_own() {
    let mut world = World::new(3, &[0.25; 6]).placed(&[0, 0, 0, 1, 1, 1]);
    world.workers[1].cpu = 0;
    world.workers[2].cpu = 1;
    world.run(SOON);
    let demands = world.demands();
    assert!((0.7..=0.8).contains(&demands[2]), "{demands:?}");
    assert_eq!(world.run(LONG), []);
}

#[test]
fn worker_that_comes_gets_queues_and_when_it_went_they_are_spread_again() {
    let mut world = World::new(3, &[0.25; 6]).placed(&[0, 0, 0, 1, 1, 1]);
    let third = world.workers.pop().unwrap();
    world.run(SOON);
    world.workers.push(third);
    world.run(SOON);
    assert!((0.2..=0.6).contains(&world.demands()[2]), "{:?}", world.demands());
    // Removing a worker moves its queues. This test moves all of them to the first worker.
    world.workers.pop();
    let moved = world.queues.iter_mut().filter(|queue| queue.worker == WorkerId(2));
    moved.for_each(|queue| queue.worker = WorkerId(0));
    world.run(SOON);
    assert_eq!(world.demands(), [0.75, 0.75]);
}

#[test]
fn queue_moves_within_its_cache_though_a_worker_beyond_it_has_less_to_do() {
    let mut world = World::new(4, &[0.4, 0.3, 0.1]).placed(&[0, 0, 1]).cached(&[0, 0, 1, 1]);
    let moves = world.run(SOON);
    assert_eq!(world.places(), [0, 1, 1], "{moves:?}");
    assert!(!moves[0].why.contains("cache"), "{moves:?}");
}

#[test]
fn queue_moves_to_another_cache_if_all_workers_of_its_own_are_busy() {
    let mut world = World::new(4, &[0.3; 8]).placed(&[0, 0, 0, 0, 1, 1, 1, 1]).cached(&[0, 0, 1, 1]);
    let moves = world.run(SOON);
    assert!(highest(&world.demands()) <= 0.61, "{:?}", world.demands());
    assert!(moves[0].why.ends_with("%; the workers share no last-level cache"), "{moves:?}");
    assert_eq!(world.run(LONG), []);
}

#[test]
fn caches_that_are_unknown_or_all_the_same_change_no_decision() {
    let demands = [0.5, 0.4, 0.3, 0.2, 0.2, 0.1];
    let moves = World::new(3, &demands).run(SOON);
    assert!(!moves.is_empty());
    assert_eq!(World::new(3, &demands).cached(&[7; 3]).run(SOON), moves);
    // Two of the workers have no known cache.
    assert_eq!(World::new(3, &demands).cached(&[7]).run(SOON), moves);
}

#[test]
fn queue_attached_by_hand_stays() {
    let mut world = World::new(2, &[0.3; 4]);
    world.queues[2].attached = true;
    world.queues[3].attached = true;
    world.run(SOON);
    assert_eq!(world.places(), [1, 1, 0, 0]);
}

#[test]
fn disk_is_not_spread_over_more_workers_than_it_may() {
    let mut world = World::new(4, &[0.3; 8]);
    world.most_workers = Some(2);
    world.run(SOON);
    let used = world.demands().iter().filter(|&&demand| demand > 0.0).count();
    assert_eq!(used, 2, "{:?}", world.demands());
}

#[test]
fn disk_that_only_one_worker_may_serve_goes_to_a_better_one_if_it_has_one_queue() {
    let mut world = World::new(2, &[0.5]);
    world.most_workers = Some(1);
    world.workers[0].quota = 0.5;
    world.run(SOON);
    assert_eq!(world.places(), [1]);
}

#[test]
fn queues_that_stop_are_forgotten() {
    let mut world = World::new(2, &[0.4; 6]);
    world.run(SOON);
    world.queues.truncate(1);
    world.step();
    assert!(world.decider.known_queues() <= 1);
}

#[test]
fn load_that_changes_sides_all_the_time_moves_a_queue_ever_more_rarely() {
    let mut world = World::new(2, &[0.5, 0.3, 0.5]).placed(&[0, 0, 1]);
    let mut moves = Vec::new();
    for second in 0..1_200 {
        // The two big queues are busy in turn, for three seconds each.
        let first_is_busy = second / 3 % 2 == 0;
        world.queues[0].demand = if first_is_busy { 0.9 } else { 0.05 };
        world.queues[2].demand = if first_is_busy { 0.05 } else { 0.9 };
        moves.extend(world.run(10).into_iter().map(|_| second));
    }
    let early = moves.iter().filter(|&&second| second < 120).count();
    let late = moves.iter().filter(|&&second| second >= 600).count();
    assert!((1..=20).contains(&early) && late <= 6, "{moves:?}");
}

#[test]
fn refused_move_is_not_tried_again_before_its_stay_is_over_and_then_more_rarely() {
    let mut world = World::new(2, &[5.0, 0.3]);
    let mut tries = Vec::new();
    for step in 0..600_u32 {
        let interval = world.measure();
        for refused in world.decider.decide(&interval) {
            if refused.queue.queue == 1 {
                tries.push(STEP * step);
            }
        }
    }
    let gaps: Vec<_> = tries.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.len() >= 3, "{tries:?}");
    assert!(gaps[0] >= FIRST_STAY, "{gaps:?}");
    assert!(gaps.windows(2).all(|pair| pair[1] * 10 >= pair[0] * 18), "{gaps:?}");
}

#[test]
fn long_interval_with_rest_in_it_decides_nothing() {
    let mut world = World::new(2, &[0.4; 4]);
    for _ in 0..20 {
        let mut interval = world.measure();
        interval.length = STALE + Duration::from_millis(1);
        assert_eq!(world.decider.decide(&interval), []);
    }
}

#[test]
fn interval_that_is_long_because_the_balancer_paused_is_no_rest() {
    let mut world = World::new(2, &[0.4; 4]);
    let mut moves = Vec::new();
    for _ in 0..20 {
        let mut interval = world.measure();
        // Makes each measured time this many times longer.
        let times = 15;
        interval.length *= times;
        interval.own_time = interval.length;
        for worker in &mut interval.workers {
            worker.cpu_time *= times;
            worker.submission_time *= times;
            worker.completion_time *= times;
        }
        interval.queues.iter_mut().for_each(|queue| queue.worker_time *= times);
        moves.extend(world.decider.decide(&interval));
    }
    assert!(!moves.is_empty());
}

#[test]
fn worker_that_never_looked_in_vain_is_full_whatever_the_samples_say() {
    let mut world = World::new(2, &[1.0; 4]);
    let mut moves = Vec::new();
    for _ in 0..10 {
        let mut interval = world.measure();
        interval.workers[0].never_idle = true;
        interval.workers[0].submission_time /= 3;
        interval.queues.iter_mut().for_each(|queue| queue.worker_time /= 3);
        moves.extend(world.decider.decide(&interval));
    }
    assert!(!moves.is_empty());
}

#[test]
fn time_counted_while_pushed_aside_is_not_load() {
    let mut world = World::new(2, &[0.1; 4]);
    for _ in 0..50 {
        let mut interval = world.measure();
        // The work took twice as long by the clock as in processor time.
        interval.workers[0].submission_time *= 2;
        interval.queues.iter_mut().for_each(|queue| queue.worker_time *= 2);
        assert_eq!(world.decider.decide(&interval), []);
    }
}

#[test]
fn reason_names_workers_queue_and_figures() {
    let mut world = World::new(2, &[0.4; 2]);
    let moves = world.run(SOON);
    assert_eq!(
        moves[0].why,
        "worker 0 is under 80 % pressure (completions are 0 % of its work), worker 1 under 0 % (completions are 0 % \
         of its work): queue 0 of `disk` uses 40 % of a CPU; with it, worker 1 will be under 40 %"
    );
}

#[test]
fn thousand_queues_on_one_of_sixteen_workers_are_spread_in_half_a_minute() {
    let mut world = World::new(16, &[0.012; 1_000]);
    world.run(300);
    let demands = world.demands();
    // A demand of 12 on 16 CPUs is balanced at 0.75 each.
    assert!(highest(&demands) <= 0.75 + MARGIN + 0.012, "{demands:?}");
    assert!(world.run(100).is_empty());
    assert!((world.served() - 12.0).abs() < 0.01, "{}", world.served());
}

#[test]
fn no_interval_makes_more_moves_than_allowed() {
    let mut world = World::new(16, &[0.012; 1_000]);
    let most = (0..100).map(|_| world.step().len()).max().unwrap();
    assert_eq!(most, MOST_MOVES);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, rng_seed: RngSeed::Fixed(6), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_start_comes_to_rest_near_the_best_assignment(
        workers in 2..4_u32,
        queues in prop::collection::vec((0.02..0.6_f64, 0..4_u32), 2..8),
        noise in 0.0..0.2_f64,
        caches in 1..4_usize,
        seed: u64,
    ) {
        let sum: f64 = queues.iter().map(|(demand, _)| demand).sum();
        // Three quarters of the capacity, so that the best assignment need not overload any worker.
        let scale = (0.75 * f64::from(workers) / sum).min(1.0);
        let demands: Vec<f64> = queues.iter().map(|(demand, _)| demand * scale).collect();
        let places: Vec<u32> = queues.iter().map(|(_, place)| place % workers).collect();
        let caches: Vec<usize> = (0..workers as usize).map(|worker| worker % caches).collect();
        let mut world = World::new(workers, &demands).placed(&places).cached(&caches);
        world.noise = noise;
        world.random = fastrand::Rng::with_seed(seed);
        world.run(SOON);
        let (found, best) = (highest(&world.demands()), best_maximum(workers, &demands));
        prop_assert!(found <= allowed(workers, best) + noise * 0.5, "{found} instead of {best}: {:?}", world.demands());
        let restless = world.run(LONG).len();
        prop_assert!(restless <= 2, "{restless} moves after coming to rest");
    }
}

#[test]
fn of_a_hundred_overloaded_worlds_at_most_three_move_anything_after_half_a_minute() {
    let restless = |seed: &u64| {
        let mut random = fastrand::Rng::with_seed(*seed);
        let (workers, count) = (random.u32(2..5), random.usize(2..20));
        let demands: Vec<f64> = (0..count).map(|_| 0.05 + 2.95 * random.f64()).collect();
        let places: Vec<u32> = (0..count).map(|_| random.u32(0..workers)).collect();
        let mut world = World::new(workers, &demands).placed(&places);
        world.noise = 0.05;
        world.random = random;
        world.run(SOON);
        !world.run(LONG).is_empty()
    };
    let restless: Vec<_> = (0..100).filter(restless).collect();
    assert!(restless.len() <= 3, "seeds {restless:?}");
}

/// The demand of a crowded queue is a guess, and in this case no placement fits the guesses. A random search found the
/// case.
#[test]
fn queues_without_a_place_that_fits_move_ever_more_rarely() {
    let demands = [1.85, 2.997, 0.683, 2.166, 0.248, 0.271, 1.095, 0.4, 0.98];
    let mut world = World::new(4, &demands).placed(&[2, 0, 0, 0, 1, 2, 0, 0, 2]);
    world.noise = 0.05;
    world.random = fastrand::Rng::with_seed(0);
    let first_five_minutes = world.run(3_000).len();
    world.run(3_000);
    let last_five_minutes = world.run(3_000).len();
    println!("moves: {first_five_minutes} at first, {last_five_minutes} at last");
    assert!(last_five_minutes <= first_five_minutes / 4, "{first_five_minutes}, then {last_five_minutes}");
}
