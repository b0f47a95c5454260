//! A simulated device with its own clock. A contestant is any code that a test provides.

use std::convert::Infallible;

use cpu::CpuPlan;
use flashcore_bench::{
    Entrant, Mode, Origin, Race, RaceInputs, Reading, Rules, Slot, Stage, Timing, Work, race,
};
use judge::values::{Inputs, Values};
use problem::{DType, Problem};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// A problem small enough for hundreds of outputs per second.
pub fn problem() -> Problem {
    Problem::new(1, 2, 64, 32, DType::F16)
}

/// Time of one correct call with its inputs in L2, µs.
pub const WARM_US: f64 = 10.0;
/// Additional time of a call whose inputs are not in L2, µs.
pub const COLD_US: f64 = 6.0;
/// Time of a launch with its events, µs.
const LAUNCH_US: f64 = 4.0;

/// The state that a contestant's host code can reach.
pub struct World<'a> {
    /// The inputs, always at the same address.
    pub inputs: &'a Inputs,
    pub out: &'a mut Values,
    /// Output that a contestant computes after the last event. It becomes visible with the next operation on
    /// the race's stream.
    pub later: &'a mut Option<Values>,
    /// Whether the inputs are in L2.
    pub in_l2: bool,
    /// Set to keep the inputs in L2 despite a flush.
    pub persist: &'a mut bool,
    /// A factor on the events' readings.
    pub timer: &'a mut f64,
}

impl World<'_> {
    /// The correct output.
    pub fn answer(&self) -> Values {
        let problem = problem();
        self.inputs.attention(&problem, &CpuPlan { threads: 1, ..CpuPlan::for_problem(&problem) }).unwrap().0
    }
}

/// A contestant: carries out a number of calls and returns their time, µs.
pub type Host = Box<dyn FnMut(&mut World, u32) -> f64>;

/// A correct contestant with `factor` times the usual time.
pub fn honest(factor: f64) -> Host {
    Box::new(move |world, calls| {
        *world.out = world.answer();
        let cold = if world.in_l2 { 0.0 } else { COLD_US };
        factor * (cold + WARM_US * f64::from(calls))
    })
}

pub struct Device {
    hosts: Vec<Host>,
    outs: Vec<Values>,
    later: Vec<Option<Values>>,
    staged: [Option<Inputs>; 2],
    live: Option<Inputs>,
    calls: u32,
    in_l2: bool,
    persist: bool,
    timer: f64,
    rng: SmallRng,
    /// Whether a flush also resets persisting L2 lines.
    pub resets_persisting: bool,
}

impl Device {
    pub fn new(hosts: Vec<Host>, calls: u32) -> Device {
        let count = hosts.len();
        Device {
            hosts,
            outs: vec![Values::zeros(DType::F16, 2 * 64 * 32); count],
            later: vec![None; count],
            staged: [None, None],
            live: None,
            calls,
            in_l2: false,
            persist: false,
            timer: 1.0,
            rng: SmallRng::seed_from_u64(11),
            resets_persisting: true,
        }
    }

    /// Applies the work that a contestant put after the last event.
    fn catch_up(&mut self) {
        for (out, later) in self.outs.iter_mut().zip(&mut self.later) {
            if let Some(values) = later.take() {
                *out = values;
            }
        }
    }
}

impl Stage for Device {
    type Error = Infallible;

    fn stage(&mut self, slot: Slot, inputs: &Inputs) -> Result<(), Infallible> {
        self.staged[slot as usize] = Some(inputs.clone());
        Ok(())
    }

    fn load(&mut self, slot: Slot) -> Result<(), Infallible> {
        self.catch_up();
        self.live = self.staged[slot as usize].clone();
        self.in_l2 = true;
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Infallible> {
        self.catch_up();
        self.persist &= !self.resets_persisting;
        self.in_l2 &= self.persist;
        Ok(())
    }

    fn poison(&mut self, who: usize) -> Result<(), Infallible> {
        self.catch_up();
        self.outs[who].fill_nan();
        Ok(())
    }

    fn run(&mut self, who: usize, work: Work) -> Result<(), Infallible> {
        self.time(who, work).map(|_| ())
    }

    fn time(&mut self, who: usize, work: Work) -> Result<Timing, Infallible> {
        self.catch_up();
        self.timer = 1.0;
        let calls = match work {
            Work::Single => 1,
            Work::Batches(batches) => batches * self.calls,
        };
        let mut world = World {
            inputs: self.live.as_ref().expect("inputs were loaded"),
            out: &mut self.outs[who],
            later: &mut self.later[who],
            in_l2: self.in_l2,
            persist: &mut self.persist,
            timer: &mut self.timer,
        };
        let us = (LAUNCH_US + self.hosts[who](&mut world, calls)) * self.rng.random_range(0.99..1.01);
        self.in_l2 = true;
        // The host sees the end a little later.
        Ok(Timing { us: us * self.timer, host_us: us + self.rng.random_range(1.0..8.0) })
    }

    fn output(&mut self, who: usize) -> Result<Values, Infallible> {
        Ok(self.outs[who].clone())
    }

    fn read(&mut self) -> Reading {
        Reading { clock_mhz: Some(1980), ..Reading::default() }
    }
}

pub const CALLS: u32 = 20;

/// Races a correct FlashCore kernel against another contestant, as a peer.
pub fn against(host: Host, mode: Mode) -> Race {
    race_on(Device::new(vec![honest(1.0), host], CALLS), mode, Origin::Peer)
}

pub fn race_on(mut device: Device, mode: Mode, origin: Origin) -> Race {
    let calls = device.calls;
    let entrant = |name: &str, origin| Entrant { name: name.to_owned(), origin, calls };
    let entrants = [entrant("flashcore", Origin::Ours), entrant("other", origin)];
    let rules = Rules { most_rounds: 24, width: 0.0, ..Rules::new(mode, 60.0, None) };
    let drawn = RaceInputs::draw(&problem(), 1).unwrap();
    race(&mut device, &drawn, &entrants, &rules).unwrap()
}
