//! A race under a supervisor that kills hanging processes. Each turn has its own time limit, because a race
//! takes as many turns as it needs.

use bench::{Reading, Slot, Stage, Timing, Work};
use judge::values::{Inputs, Values};

/// A stage that announces each turn while the device is idle.
pub(super) struct Watched<'a, S> {
    pub stage: S,
    pub turn: &'a mut dyn FnMut(),
}

impl<S: Stage> Stage for Watched<'_, S> {
    type Error = S::Error;

    fn stage(&mut self, slot: Slot, inputs: &Inputs) -> Result<(), S::Error> {
        (self.turn)();
        self.stage.stage(slot, inputs)
    }

    fn load(&mut self, slot: Slot) -> Result<(), S::Error> {
        self.stage.load(slot)
    }

    /// A turn begins with the flush of L2.
    fn flush(&mut self) -> Result<(), S::Error> {
        (self.turn)();
        self.stage.flush()
    }

    fn poison(&mut self, who: usize) -> Result<(), S::Error> {
        self.stage.poison(who)
    }

    fn run(&mut self, who: usize, work: Work) -> Result<(), S::Error> {
        self.stage.run(who, work)
    }

    fn time(&mut self, who: usize, work: Work) -> Result<Timing, S::Error> {
        self.stage.time(who, work)
    }

    fn output(&mut self, who: usize) -> Result<Values, S::Error> {
        self.stage.output(who)
    }

    fn read(&mut self) -> Reading {
        self.stage.read()
    }
}
