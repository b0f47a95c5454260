//! The device of a race as an interface: a GPU's stream, this machine's CPU, or a simulated device of a test.

use judge::values::{Inputs, Values};
use serde::Serialize;

use super::sensors::Reading;

/// The state of the device before the timed call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// An untimed run of the same call goes before.
    Warm,
    /// L2 is filled with other data before.
    Cold,
    /// Like warm, with untimed and timed runs so long that the clock falls to the one that the power limit
    /// allows.
    Sustained,
}

impl Mode {
    pub const ALL: [Mode; 3] = [Mode::Warm, Mode::Cold, Mode::Sustained];

    /// The word in rows and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Mode::Warm => "warm",
            Mode::Cold => "cold",
            Mode::Sustained => "sustained",
        }
    }

    /// The smallest relative difference that counts as a difference. A kernel that is prepared twice lies at
    /// different addresses, hence in different L2 slices and memory channels. The resulting advantage or
    /// disadvantage lasts through a race, and neither more rounds nor the A/A control average it out. `bench
    /// --control` prepares the kernel anew for each race and shows the size of this effect.
    pub const fn margin(self) -> f64 {
        match self {
            Mode::Warm | Mode::Sustained => 0.01,
            Mode::Cold => 0.05,
        }
    }
}

/// The unit of work in a turn, packed before the race.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// One call.
    Single,
    /// This number of batches in a row, each of [`Entrant::calls`] calls. Batches keep the timer and the
    /// launch from hiding the time of short kernels.
    Batches(u32),
}

/// Whether a contestant is a FlashCore kernel or a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// A FlashCore kernel: PTX and a launch contract, no host code.
    Ours,
    /// A library of another project.
    Peer,
}

/// The data of a contestant that the race uses.
#[derive(Clone, Debug, PartialEq)]
pub struct Entrant {
    pub name: String,
    /// FlashCore kernels must meet the error model itself, peers a multiple of it.
    pub origin: Origin,
    /// Calls in a batch.
    pub calls: u32,
}

/// The name of FlashCore kernels in rows.
pub const OURS: &str = "flashcore";

/// A library has a name that is reserved for FlashCore kernels.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid value '{0}' for the name of a peer: expected a name other than that of FlashCore's kernels")]
pub struct NotOurs(pub String);

impl Entrant {
    /// A FlashCore kernel. `variant` distinguishes several plans.
    pub fn ours(variant: Option<&str>, calls: u32) -> Entrant {
        let name = variant.map_or(OURS.to_owned(), |variant| format!("{OURS} {variant}"));
        Entrant { name, origin: Origin::Ours, calls }
    }

    /// A library of another project.
    ///
    /// # Errors
    /// [`NotOurs`] for a name that is reserved for FlashCore kernels.
    pub fn peer(name: &str, calls: u32) -> Result<Entrant, NotOurs> {
        if name.to_lowercase().starts_with(OURS) {
            return Err(NotOurs(name.to_owned()));
        }
        Ok(Entrant { name: name.to_owned(), origin: Origin::Peer, calls })
    }
}

/// The time of one sample by two clocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// By the device's clock, between the two events around the work, µs.
    pub us: f64,
    /// By the host's clock, from seeing the first event complete to seeing the second, µs.
    pub host_us: f64,
}

/// One of two staging areas for inputs, separate from the live inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    A,
    B,
}

impl Slot {
    pub const fn other(self) -> Slot {
        match self {
            Slot::A => Slot::B,
            Slot::B => Slot::A,
        }
    }
}

/// Runs contestants, which are known by their index. All work happens in the order of the calls, on one
/// stream. Only [`Stage::time`] and [`Stage::output`] wait for it.
pub trait Stage {
    /// The error of the device. After an error the stage cannot be used any more.
    type Error: std::error::Error;

    /// Copies inputs into a staging area, so that a later load does not wait for the host.
    ///
    /// # Errors
    /// The error of the stage.
    fn stage(&mut self, slot: Slot, inputs: &Inputs) -> Result<(), Self::Error>;

    /// Copies a staging area into the live inputs, whose addresses the contestants have known from the start.
    ///
    /// # Errors
    /// The error of the stage.
    fn load(&mut self, slot: Slot) -> Result<(), Self::Error>;

    /// Fills the caches with other data and releases persisting cache lines.
    ///
    /// # Errors
    /// The error of the stage.
    fn flush(&mut self) -> Result<(), Self::Error>;

    /// Fills a contestant's output with NaN.
    ///
    /// # Errors
    /// The error of the stage.
    fn poison(&mut self, who: usize) -> Result<(), Self::Error>;

    /// Runs a contestant, untimed.
    ///
    /// # Errors
    /// The error of the stage.
    fn run(&mut self, who: usize, work: Work) -> Result<(), Self::Error>;

    /// Runs a contestant between two events and waits for the second.
    ///
    /// # Errors
    /// The error of the stage.
    fn time(&mut self, who: usize, work: Work) -> Result<Timing, Self::Error>;

    /// Reads a contestant's output, dense as `[batch, head, row, dim]`, waiting only for earlier work on the
    /// race's own stream.
    ///
    /// # Errors
    /// The error of the stage.
    fn output(&mut self, who: usize) -> Result<Values, Self::Error>;

    /// Reads clocks, power, temperature and throttle state.
    fn read(&mut self) -> Reading;
}
