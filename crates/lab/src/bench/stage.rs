//! Where contestants run, as the race sees it: a GPU's stream, this machine's CPU, or a device made up by a test.

use serde::Serialize;

use super::sensors::Reading;
use crate::values::{Inputs, Values};

/// What went before the call that is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The same call went before, untimed.
    Warm,
    /// L2 was filled with other data before.
    Cold,
    /// As warm, and for so long, both untimed and timed, that the clocks are those which the device's power allows.
    Sustained,
}

impl Mode {
    /// Every mode.
    pub const ALL: [Mode; 3] = [Mode::Warm, Mode::Cold, Mode::Sustained];

    /// The word in rows and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Mode::Warm => "warm",
            Mode::Cold => "cold",
            Mode::Sustained => "sustained",
        }
    }

    /// The least difference, as a part of the time, that is called one. The same kernel prepared twice lies at other addresses,
    /// in other slices of L2 and other channels of memory, and keeps the advantage or disadvantage through a whole race, where
    /// neither rounds nor the twin average it out. `bench --control` prepares anew for each race and shows how far apart
    /// that comes out.
    pub const fn margin(self) -> f64 {
        match self {
            Mode::Warm | Mode::Sustained => 0.01,
            Mode::Cold => 0.05,
        }
    }
}

/// How a contestant's work was packed, by us, before the race.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// One call.
    Single,
    /// So many batches in a row, each of [`Entrant::calls`] calls, so that short kernels are not hidden by the timer and the launch.
    Batches(u32),
}

/// Whose work it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// A kernel of ours: PTX and a launch contract, no host code.
    Ours,
    /// Somebody else's library.
    Peer,
}

/// What the race knows of a contestant.
#[derive(Clone, Debug, PartialEq)]
pub struct Entrant {
    /// Its name.
    pub name: String,
    /// Whose it is; ours are held to the error model itself, peers to a multiple of it.
    pub origin: Origin,
    /// Calls in a batch.
    pub calls: u32,
}

/// The name that rows give to our kernels.
pub const OURS: &str = "flashcore";

/// A library that calls itself one of our kernels.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("name = \"{0}\" is that of our own kernels, which come as PTX; accepted for a peer: any other name")]
pub struct NotOurs(pub String);

impl Entrant {
    /// A kernel of ours. `variant` tells several plans apart.
    pub fn ours(variant: Option<&str>, calls: u32) -> Entrant {
        let name = variant.map_or(OURS.to_owned(), |variant| format!("{OURS} {variant}"));
        Entrant { name, origin: Origin::Ours, calls }
    }

    /// Somebody else's library.
    ///
    /// # Errors
    /// [`NotOurs`] for a name that rows keep for our own kernels.
    pub fn peer(name: &str, calls: u32) -> Result<Entrant, NotOurs> {
        if name.to_lowercase().starts_with(OURS) {
            return Err(NotOurs(name.to_owned()));
        }
        Ok(Entrant { name: name.to_owned(), origin: Origin::Peer, calls })
    }
}

/// One timed piece of work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// By the device's own clock, between two events around it, µs.
    pub us: f64,
    /// By the host's clock, from when the first event was seen done until the second was, µs.
    pub host_us: f64,
}

/// One of the two sets of inputs that stand ready beside the live one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    A,
    B,
}

impl Slot {
    /// The other one.
    pub const fn other(self) -> Slot {
        match self {
            Slot::A => Slot::B,
            Slot::B => Slot::A,
        }
    }
}

/// Runs the contestants, whom it knows by their number. Everything happens in the order of the calls, on one stream; only
/// [`Stage::time`] and [`Stage::output`] wait.
pub trait Stage {
    /// What can go wrong; after an error the stage is of no more use.
    type Error: std::error::Error;

    /// Puts inputs aside, to be loaded later without a wait.
    ///
    /// # Errors
    /// The stage's.
    fn stage(&mut self, slot: Slot, inputs: &Inputs) -> Result<(), Self::Error>;

    /// Makes these the values of the live inputs, at the addresses that the contestants have known from the start.
    ///
    /// # Errors
    /// The stage's.
    fn load(&mut self, slot: Slot) -> Result<(), Self::Error>;

    /// Fills the caches with other data, and takes back whatever was asked to persist in them.
    ///
    /// # Errors
    /// The stage's.
    fn flush(&mut self) -> Result<(), Self::Error>;

    /// Fills a contestant's output with NaN.
    ///
    /// # Errors
    /// The stage's.
    fn poison(&mut self, who: usize) -> Result<(), Self::Error>;

    /// Runs a contestant, untimed.
    ///
    /// # Errors
    /// The stage's.
    fn run(&mut self, who: usize, work: Work) -> Result<(), Self::Error>;

    /// Runs a contestant between two events, and waits for the second.
    ///
    /// # Errors
    /// The stage's.
    fn time(&mut self, who: usize, work: Work) -> Result<Timing, Self::Error>;

    /// What a contestant's output holds now, dense as `[batch, head, row, dim]`: read without waiting for anything but what
    /// went before on our stream.
    ///
    /// # Errors
    /// The stage's.
    fn output(&mut self, who: usize) -> Result<Values, Self::Error>;

    /// Clocks, power, temperature and throttle state now.
    fn read(&mut self) -> Reading;
}
