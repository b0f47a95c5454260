//! The names that diagnoses and cures share.

use std::fmt;

use serde::{Serialize, Serializer};

macro_rules! symptoms {
    ($($variant:ident = $name:literal)*) => {
        /// A root cause that the diagnosis of a kernel finds, or the resource that limits the kernel's time
        /// in the time model. Each has the name that `explain --json` gives it, and the genes state which of
        /// them they may cure.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Symptom { $($variant),* }

        impl Symptom {
            pub const fn name(self) -> &'static str {
                match self { $(Symptom::$variant => $name),* }
            }

            /// The symptom with this name.
            pub fn named(name: &str) -> Option<Symptom> {
                match name { $($name => Some(Symptom::$variant),)* _ => None }
            }
        }
    };
}

symptoms! {
    SerialReduction = "serial reduction"
    SerialSection = "serial section"
    IdleWarps = "idle warps"
    IdleLanes = "idle lanes"
    TensorCoresUnused = "tensor cores unused"
    TensorCoresHardlyUsed = "tensor cores hardly used"
    SmallGrid = "small grid"
    LowOccupancy = "low occupancy"
    Barriers = "barriers"
    BankConflicts = "bank conflicts"
    Uncoalesced = "uncoalesced global accesses"
    ScalarAccesses = "scalar global accesses"
    LocalMemory = "local memory"
    RegisterSpills = "register spills"
    RedundantLoads = "redundant loads"
    NoOverlap = "no overlap of copies"
    LaunchOverhead = "launch overhead"
    PipelineTooShort = "pipeline too short"
    WaitsForCopies = "waits for copies"
    Exponentials = "exponentials"
    LongestWait = "longest wait"
    Tensor = "tensor"
    Fma = "fma"
    Alu = "alu"
    Half = "half"
    Double = "double"
    Mufu = "mufu"
    Issue = "issue"
    Shared = "shared"
    L1 = "l1"
    L2 = "l2"
    Dram = "dram"
    Latency = "latency"
    Serial = "serial"
    Launch = "launch"
}

impl fmt::Display for Symptom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for Symptom {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}
