//! The race: who runs when, what is timed, what is looked at, and who is out.
//!
//! A turn, warm: flush, an untimed run, poison the output, time. Cold: poison, flush, time. The flush comes first in a warm
//! turn, too: it leaves the same state whoever had the turn before, and it keeps the device busy while the host puts the
//! rest in line, so that no launch waits for the host between the two events. Sustained: as warm, with so many batches in the untimed
//! run, and in the timed one, that each takes [`SUSTAINED_US`].
//!
//! In the first round, in one in the middle and in one at the end, every contestant meets new values at the addresses that
//! it knows, between the untimed run and the timed one, and what the timed run wrote is held against the oracle. So is the
//! output of every fourth turn, at random. Nobody can tell a turn that is looked at from one that is not.

use std::time::Instant;

use cpu::CpuError;
use problem::Problem;
use rayon::prelude::*;
use serde::Serialize;

use super::answer::Answer;
use super::fault::Fault;
use super::floor::{Floor, Peaks};
use super::schedule::{is_looked_at, middle, palindrome};
use super::sensors::Reading;
use super::stage::{Entrant, Mode, Origin, Slot, Stage, Timing, Work};
use super::statistics::{Comparison, compare, control, interval, median, quantile};
use crate::gate::judge::ErrorFigures;

/// Inputs of a race with their answers: one to begin with, one for each time that new values come.
pub struct Deck {
    /// The problem, dense.
    pub problem: Problem,
    answers: Vec<Answer>,
}

impl Deck {
    /// Draws. Races of one problem in several modes may share a deck.
    ///
    /// # Errors
    /// When the oracle refuses the problem.
    pub fn draw(problem: &Problem, seed: u64) -> Result<Deck, CpuError> {
        // To begin with, first, middle, last.
        let draws = (0..4u64).into_par_iter();
        let answers =
            draws.map(|i| Answer::draw(problem, seed.wrapping_mul(4) + i)).collect::<Result<_, _>>()?;
        Ok(Deck { problem: super::answer::dense(problem), answers })
    }

    /// Rows of the output that are judged each time.
    pub fn rows(&self) -> usize {
        self.answers[0].rows()
    }
}

/// How long, and against what.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// What goes before what is timed.
    pub mode: Mode,
    /// Draws the order of turns and the turns that are looked at.
    pub seed: u64,
    /// A race ends with the round in which this time is over, s ...
    pub seconds: f64,
    /// ... but not before so many rounds ...
    pub least_rounds: usize,
    /// ... nor after so many ...
    pub most_rounds: usize,
    /// ... and it may end once every interval of ratios is this narrow (its width in logarithms). It is the width that
    /// ends it, never the verdict, so looking on the way does not favour one (Chow & Robbins 1965).
    pub width: f64,
    /// The device's peaks; without them there is no floor.
    pub peaks: Option<Peaks>,
}

impl Rules {
    /// Rounds that a bootstrap over blocks needs.
    pub const LEAST_ROUNDS: usize = 12;

    /// About `seconds` of it.
    pub fn new(mode: Mode, seconds: f64, peaks: Option<Peaks>) -> Rules {
        Rules {
            mode,
            seed: 1,
            seconds,
            least_rounds: Rules::LEAST_ROUNDS,
            most_rounds: 60,
            width: 0.002,
            peaks,
        }
    }
}

/// One timed piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Sample {
    /// Time of one call, µs.
    pub us: f64,
    /// The same by the host's clock.
    pub host_us: f64,
    /// The round, from 0.
    pub round: usize,
    /// Whether the inputs were new to the contestant; such samples stand apart.
    pub fresh: bool,
    /// What the device said right after.
    pub reading: Reading,
}

/// What one contestant did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measurement {
    /// Its name.
    pub name: String,
    /// Whose it is.
    pub origin: Origin,
    /// Calls in one sample.
    pub calls: u32,
    /// Every sample in the order in which they were taken; for the first contestant not those of its twin.
    pub samples: Vec<Sample>,
    /// The worst error of the outputs that were looked at.
    pub error: Option<ErrorFigures>,
    /// Outputs that were looked at.
    pub looked_at: usize,
    /// Why its times do not count.
    pub fault: Option<Fault>,
    /// The first contestant against this one; of the first itself, against its twin.
    pub comparison: Option<Comparison>,
}

impl Measurement {
    /// Times of a call that count, µs.
    pub fn times(&self) -> Vec<f64> {
        self.samples.iter().filter(|s| !s.fresh).map(|s| s.us).collect()
    }

    /// Their median.
    pub fn us(&self) -> f64 {
        median(&self.times())
    }

    fn fresh(&self) -> Vec<f64> {
        self.samples.iter().filter(|s| s.fresh).map(|s| s.us).collect()
    }
}

/// A race that took place.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Race {
    /// The problem, dense.
    pub problem: Problem,
    /// What went before what was timed.
    pub mode: Mode,
    /// Rounds.
    pub rounds: usize,
    /// Rows of the output that were judged each time.
    pub judged_rows: usize,
    /// The least time of a call, where the device is known.
    pub floor: Option<Floor>,
    /// The contestants in the order given; all are compared with the first.
    pub measurements: Vec<Measurement>,
}

impl Race {
    /// The first contestant, with which the others are compared.
    pub fn first(&self) -> &Measurement {
        // `race` refuses to start without one.
        &self.measurements[0]
    }

    /// The fastest peer whose times count.
    pub fn best_peer(&self) -> Option<&Measurement> {
        let peers = self.measurements.iter().filter(|m| m.origin == Origin::Peer && m.fault.is_none());
        peers.filter(|m| m.us().is_finite()).min_by(|a, b| a.us().total_cmp(&b.us()))
    }
}

/// Why a race did not take place.
#[derive(Debug, thiserror::Error)]
pub enum RaceError<E: std::error::Error> {
    /// Nobody came.
    #[error("contestants = 0; accepted: at least one")]
    Nobody,
    /// The device broke down.
    #[error("{0}")]
    Stage(E),
}

/// Races contestants on a stage.
///
/// # Errors
/// When the stage breaks down. A contestant that breaks the rules is out, with a [`Fault`], and the others go on.
pub fn race<S: Stage>(
    stage: &mut S,
    deck: &Deck,
    entrants: &[Entrant],
    rules: &Rules,
) -> Result<Race, RaceError<S::Error>> {
    if entrants.is_empty() {
        return Err(RaceError::Nobody);
    }
    let mut run = Run::new(stage, deck, entrants, rules);
    run.line_up().and_then(|()| run.all_rounds()).map_err(RaceError::Stage)?;
    Ok(run.finish())
}

/// The inputs that are live, and those that will be.
#[derive(Clone, Copy)]
struct Live {
    slot: Slot,
    answer: usize,
}

struct Run<'a, S> {
    stage: &'a mut S,
    deck: &'a Deck,
    entrants: &'a [Entrant],
    rules: &'a Rules,
    live: Live,
    measurements: Vec<Measurement>,
    /// One for each lane: the contestants, then the first one's twin. Two times for each round that counts.
    lanes: Vec<Vec<f64>>,
    /// The least time of one call alone, for the contestants whose calls come in batches.
    singles: Vec<f64>,
    /// What each contestant does in a turn.
    work: Vec<Work>,
    floor: Option<Floor>,
    rounds: usize,
}

/// What a sustained run takes at least, µs: an H200 that computes without a pause has the clocks of its power limit by then, ...
pub const SUSTAINED_US: f64 = 3e5;
/// ... unless that are more batches than this, as of kernels that are over before their launch is.
const MOST_BATCHES: f64 = 1e4;
/// Runs of which the least time is taken.
const FEW: usize = 5;
/// A batch whose calls take less than this part of what one takes alone was not worked off call by call. A launch and its
/// events are in the time of the one alone, and neighbours in a batch may overlap, so honest batches come down to a third.
const BATCH_PART: f64 = 0.15;
/// All times on inputs not seen before above this multiple of (nearly) all others: answers are kept.
const SEEN_RATIO: f64 = 1.25;
/// The host's clock may say more than the events by this part and these µs: it sees both only when it is told.
const HOST_PART: f64 = 1.25;
const HOST_US: f64 = 30.0;

impl<'a, S: Stage> Run<'a, S> {
    fn new(stage: &'a mut S, deck: &'a Deck, entrants: &'a [Entrant], rules: &'a Rules) -> Run<'a, S> {
        let measurement = |entrant: &Entrant| Measurement {
            name: entrant.name.clone(),
            origin: entrant.origin,
            calls: if rules.mode == Mode::Cold { 1 } else { entrant.calls },
            samples: Vec::new(),
            error: None,
            looked_at: 0,
            fault: None,
            comparison: None,
        };
        Run {
            stage,
            deck,
            entrants,
            rules,
            live: Live { slot: Slot::A, answer: 0 },
            measurements: entrants.iter().map(measurement).collect(),
            lanes: vec![Vec::new(); entrants.len() + 1],
            singles: vec![f64::NAN; entrants.len()],
            work: vec![
                if rules.mode == Mode::Cold { Work::Single } else { Work::Batches(1) };
                entrants.len()
            ],
            floor: rules.peaks.map(|peaks| peaks.floor(&deck.problem, rules.mode)),
            rounds: 0,
        }
    }

    /// No time is taken of what is wrong: everyone computes once before.
    fn line_up(&mut self) -> Result<(), S::Error> {
        self.stage.stage(Slot::A, &self.deck.answers[0].inputs)?;
        self.stage.load(Slot::A)?;
        for who in 0..self.entrants.len() {
            self.stage.poison(who)?;
            self.stage.run(who, Work::Single)?;
            self.look(who, None)?;
            if self.rules.mode == Mode::Sustained && self.is_in(who) {
                let batches = SUSTAINED_US / self.least_us(who, Work::Batches(1))?;
                let batches = batches.ceil().clamp(1.0, MOST_BATCHES) as u32;
                self.work[who] = Work::Batches(batches);
                self.measurements[who].calls *= batches;
            }
            if self.measurements[who].calls > 1 && self.is_in(who) {
                self.singles[who] = self.least_us(who, Work::Single)?;
            }
        }
        Ok(())
    }

    /// The least of a few times that count nowhere.
    fn least_us(&mut self, who: usize, work: Work) -> Result<f64, S::Error> {
        let mut least = f64::INFINITY;
        for _ in 0..FEW {
            least = least.min(self.turn_on(who, work, None)?.us);
        }
        Ok(least)
    }

    fn all_rounds(&mut self) -> Result<(), S::Error> {
        let start = Instant::now();
        let middle = middle(self.rules.seed, self.rules.least_rounds as u64) as usize;
        while self.measurements.iter().any(|m| m.fault.is_none()) {
            let last = self.is_enough(start.elapsed().as_secs_f64());
            self.round(last || [0, middle].contains(&self.rounds))?;
            self.rounds += 1;
            if last {
                break;
            }
        }
        Ok(())
    }

    /// Whether the next round is the last, in which inputs are new once more.
    fn is_enough(&self, seconds: f64) -> bool {
        let (rounds, rules) = (self.rounds, self.rules);
        let narrow = || {
            let logs: Vec<Vec<f64>> = self.lanes.iter().map(|lane| logs(lane)).collect();
            logs[1..].iter().filter(|lane| lane.len() == logs[0].len()).all(|lane| {
                let ratios: Vec<f64> = lane.iter().zip(&logs[0]).map(|(b, a)| b - a).collect();
                let found = interval(&ratios);
                found.high - found.low <= rules.width
            })
        };
        let enough = rounds + 1 >= rules.least_rounds && seconds >= rules.seconds;
        // Now and then only: an interval costs more than a round of short kernels.
        let looks = rounds + 1 >= 2 * rules.least_rounds && rounds.is_multiple_of(16);
        enough || rounds + 1 >= rules.most_rounds || (looks && narrow())
    }

    fn round(&mut self, fresh: bool) -> Result<(), S::Error> {
        let next =
            Live { slot: self.live.slot.other(), answer: (self.live.answer + 1) % self.deck.answers.len() };
        if fresh {
            self.stage.stage(next.slot, &self.deck.answers[next.answer].inputs)?;
        }
        let before = self.live;
        let mut met = vec![false; self.entrants.len()];
        let turns = palindrome(self.lanes.len(), self.rules.seed, self.rounds as u64);
        for (index, lane) in turns.into_iter().enumerate() {
            let who = if lane == self.entrants.len() { 0 } else { lane };
            if !self.is_in(who) {
                continue;
            }
            let new = fresh && !std::mem::replace(&mut met[who], true);
            let work = self.work[who];
            let timing = if new {
                self.live = before;
                self.turn_on(who, work, Some(next))?
            } else {
                self.turn_on(who, work, None)?
            };
            self.keep(lane, who, new, fresh, timing);
            if new || is_looked_at(self.rules.seed, self.rounds as u64, index as u64) {
                self.look(who, new.then_some(before.answer))?;
            }
        }
        Ok(())
    }

    /// One turn: `next` are inputs that come between the untimed run and the timed one.
    fn turn_on(&mut self, who: usize, work: Work, next: Option<Live>) -> Result<Timing, S::Error> {
        let load = |run: &mut Self, live: Live| {
            run.live = live;
            run.stage.load(live.slot)
        };
        match self.rules.mode {
            Mode::Warm | Mode::Sustained => {
                if next.is_some() {
                    load(self, self.live)?;
                }
                self.stage.flush()?;
                self.stage.run(who, work)?;
                next.map_or(Ok(()), |live| load(self, live))?;
                self.stage.poison(who)?;
            }
            Mode::Cold => {
                next.map_or(Ok(()), |live| load(self, live))?;
                self.stage.poison(who)?;
                self.stage.flush()?;
            }
        }
        self.stage.time(who, work)
    }

    fn keep(&mut self, lane: usize, who: usize, new: bool, fresh_round: bool, timing: Timing) {
        let reading = self.stage.read();
        let calls = f64::from(self.measurements[who].calls.max(1));
        let sample = Sample {
            us: timing.us / calls,
            host_us: timing.host_us / calls,
            round: self.rounds,
            fresh: new,
            reading,
        };
        if lane == who || new {
            self.measurements[who].samples.push(sample);
        }
        // A round with new inputs is not one of equals.
        if !fresh_round {
            self.lanes[lane].push(sample.us);
        }
    }

    /// Holds the output against the oracle; where inputs are new, also against what the ones before would have given.
    fn look(&mut self, who: usize, before: Option<usize>) -> Result<(), S::Error> {
        let out = self.stage.output(who)?;
        let origin = self.entrants[who].origin;
        let measurement = &mut self.measurements[who];
        measurement.looked_at += 1;
        match self.deck.answers[self.live.answer].judge(&out, origin) {
            Ok(error) => {
                measurement.error = Some(measurement.error.map_or(error, |worst| worst.worst(error)))
            }
            Err(fault) => {
                let stale = before.is_some_and(|i| self.deck.answers[i].judge(&out, origin).is_ok());
                measurement.fault = Some(if stale { Fault::Stale } else { fault });
            }
        }
        Ok(())
    }

    fn is_in(&self, who: usize) -> bool {
        self.measurements[who].fault.is_none()
    }

    /// Faults that only all samples show, and the comparisons of those who are still in.
    fn finish(mut self) -> Race {
        for who in 0..self.entrants.len() {
            if self.is_in(who) {
                self.measurements[who].fault = self.fault_of_times(who);
            }
        }
        let logs: Vec<Vec<f64>> = self.lanes.iter().map(|lane| logs(lane)).collect();
        let (twin, margin) = (&logs[self.entrants.len()], self.rules.mode.margin());
        for who in 0..self.entrants.len() {
            let comparable = self.is_in(0) && self.is_in(who) && !logs[who].is_empty();
            self.measurements[who].comparison = comparable.then(|| match who {
                0 => control(&logs[0], twin, margin),
                _ => compare(&logs[0], &logs[who], twin, margin),
            });
        }
        Race {
            problem: self.deck.problem.clone(),
            mode: self.rules.mode,
            rounds: self.rounds,
            judged_rows: self.deck.rows(),
            floor: self.floor,
            measurements: self.measurements,
        }
    }

    fn fault_of_times(&self, who: usize) -> Option<Fault> {
        let measurement = &self.measurements[who];
        let (times, fresh) = (measurement.times(), measurement.fresh());
        let us = median(&times);
        // Of the same samples: on a busy machine the median of others may be another time.
        let counting = measurement.samples.iter().filter(|s| !s.fresh);
        let host_us = median(&counting.map(|s| s.host_us).collect::<Vec<_>>());
        let calls = measurement.calls;
        if host_us > HOST_PART * us + HOST_US / f64::from(calls.max(1)) {
            return Some(Fault::TimerDisagrees { us, host_us });
        }
        let least = times.iter().copied().fold(f64::INFINITY, f64::min);
        if let Some(floor) = self.floor.filter(|floor| least < floor.us()) {
            let Floor { flops_us, bytes_us } = floor;
            return Some(Fault::UnderFloor { us: least, floor_us: floor.us(), flops_us, bytes_us });
        }
        let single_us = self.singles[who];
        if calls > 1 && us < BATCH_PART * single_us {
            return Some(Fault::Batched { calls, us, single_us });
        }
        let fresh_us = fresh.iter().copied().fold(f64::INFINITY, f64::min);
        if fresh_us.is_finite() && fresh_us > SEEN_RATIO * quantile(&times, 0.9) {
            return Some(Fault::FasterOnSeenInputs { fresh_us, seen_us: us });
        }
        None
    }
}

/// Mean log-times of the rounds of a lane, which has two turns in each.
fn logs(lane: &[f64]) -> Vec<f64> {
    lane.chunks_exact(2).map(|turns| f64::midpoint(turns[0].ln(), turns[1].ln())).collect()
}
