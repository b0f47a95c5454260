//! A machine's description from probes: the constants of the time model, measured where a probe determines
//! them, and otherwise taken from the table.

use predict::Gpu;
use predict::machine::{DRAM_EFFICIENCY, L4, MACHINES};
use ptx::{Builder, Dim3, Kernel, Launch, Target, Violations};
use serde::Serialize;
use serde_json::{Value, json};

use super::{Figure, Kind};

/// A device's properties by its driver.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceProperties {
    pub name: String,
    /// Compute capability times ten.
    pub sm: u32,
    /// Number of SMs.
    pub sms: u32,
    /// L2, bytes; 0 where the driver does not report it.
    pub l2_bytes: u64,
    /// The clock of the SMs during the measurement, MHz, if known.
    pub clock_mhz: Option<f64>,
}

/// A probe's measurement with the model's prediction for the same kernel.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub probe: String,
    pub kind: Kind,
    /// Measured clocks.
    pub clocks: f64,
    /// Clocks that the model predicts for the table's machine; `None` where it has no answer.
    pub forecast: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Constant {
    /// The name in the description.
    pub name: &'static str,
    /// The meaning, with its unit.
    pub what: &'static str,
    /// The table's value, for this machine or for one of the same kind.
    pub table: f64,
    /// The measured value; `None` if no probe determines it.
    pub measured: Option<f64>,
}

/// A machine description with its sources.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    pub machine: Gpu,
    /// The built-in machine that fills in unmeasured values.
    pub base: &'static str,
    /// Every constant that a probe can determine.
    pub constants: Vec<Constant>,
}

/// The rule that derives a constant from probes. Its `value` is `None` when a probe is missing.
struct Rule {
    name: &'static str,
    what: &'static str,
    value: fn(&Seen) -> Option<f64>,
    place: fn(&mut Gpu) -> Place<'_>,
}

/// The field of a constant in a description.
enum Place<'a> {
    Whole(&'a mut u32),
    Real(&'a mut f64),
    /// The machine has no such unit, so the value is not stored.
    Nowhere,
}

impl Place<'_> {
    fn get(&self) -> Option<f64> {
        match self {
            Place::Whole(value) => Some(f64::from(**value)),
            Place::Real(value) => Some(**value),
            Place::Nowhere => None,
        }
    }

    fn set(self, value: f64) {
        match self {
            // Clocks and lanes are whole numbers. A fractional rate (such as an mma in 1.5 clocks) is stored
            // as FLOP per clock.
            Place::Whole(place) => *place = value.round() as u32,
            Place::Real(place) => *place = value,
            Place::Nowhere => {}
        }
    }
}

/// The measurements from which constants are derived.
struct Seen<'a> {
    rows: &'a [Row],
    launch_us: Option<f64>,
    sms: f64,
    clock_mhz: f64,
}

impl Seen<'_> {
    /// Clocks of a probe; `None` for implausibly small ones, where ptxas removed the operation.
    fn clocks(&self, name: &str) -> Option<f64> {
        let clocks = self.rows.iter().find(|row| row.probe == name)?.clocks;
        (clocks.is_finite() && clocks > 0.2).then_some(clocks)
    }

    /// Lanes per clock, from the clocks that an SM needs for a warp's operations.
    fn lanes(&self, name: &str, operations: f64) -> Option<f64> {
        Some(32.0 * operations / self.clocks(name)?)
    }

    /// Additional clocks of a barrier per additional warp.
    fn barrier_warp(&self) -> Option<f64> {
        Some((self.clocks("bar.sync, 32 warps")? - self.clocks("bar.sync, 4 warps")?) / 28.0)
    }
}

/// FLOP of a matrix product.
const fn flop(m: u32, n: u32, k: u32) -> f64 {
    2.0 * m as f64 * n as f64 * k as f64
}

macro_rules! rules {
    ($($name:literal, $what:literal, $place:ident($($field:ident).+), $value:expr;)*) => {
        [$(Rule { name: $name, what: $what, value: $value, place: |gpu| Place::$place(&mut gpu.$($field).+) }),*]
    };
}

const RULES: [Rule; 26] = rules! {
    "latency.alu", "f32 and integer arithmetic, clocks", Whole(latency.alu), |s| s.clocks("fma chain");
    "latency.mufu", "ex2 and its like, clocks", Whole(latency.mufu), |s| s.clocks("ex2.ftz chain");
    "latency.shuffle", "shuffle, clocks", Whole(latency.shuffle), |s| s.clocks("shfl chain");
    "latency.barrier", "barrier, clocks", Whole(latency.barrier),
        |s| Some(s.clocks("bar.sync, 4 warps")? - 4.0 * s.barrier_warp()?);
    "latency.barrier_warp", "and for each warp, clocks", Whole(latency.barrier_warp), |s| s.barrier_warp();
    "latency.shared", "load from shared memory, clocks", Whole(latency.shared), |s| s.clocks("ld.shared.b32 chain");
    "latency.shared_pass", "each further pass over its banks, clocks", Whole(latency.shared_pass),
        |s| Some((s.clocks("ld.shared.b32 chain, 32 ways")? - s.clocks("ld.shared.b32 chain")?) / 31.0);
    "latency.l1", "load from L1, clocks", Whole(latency.l1), |s| s.clocks("ld.global chain in L1");
    "latency.l2", "load from L2, clocks", Whole(latency.l2), |s| s.clocks("ld.global chain in L2, a thousand lines");
    "latency.dram", "load from DRAM, clocks", Whole(latency.dram), |s| s.clocks("ld.global chain in DRAM");
    "latency.mma_k8", "mma.m16n8k8, clocks", Whole(latency.mma_k8), |s| s.clocks("mma.m16n8k8 chain");
    "latency.mma_k16", "mma.m16n8k16, clocks", Whole(latency.mma_k16), |s| s.clocks("mma.m16n8k16 chain");
    "rates.fma", "f32 multiply-add, lanes a clock", Whole(rates.fma), |s| s.lanes("fma rate", 1.0);
    "rates.imad", "integer multiply-add, lanes a clock", Whole(rates.imad), |s| s.lanes("imad rate", 1.0);
    "rates.alu", "integer logic and shifts, lanes a clock", Whole(rates.alu), |s| s.lanes("lop3 shf rate", 2.0);
    "rates.half2", "f16x2 multiply-add, lanes a clock", Whole(rates.half2), |s| s.lanes("hfma2 rate", 1.0);
    "rates.mufu", "ex2, lanes a clock", Whole(rates.mufu), |s| s.lanes("ex2.ftz rate", 1.0);
    "tensor.f16_f32", "mma of an SM, FLOP a clock", Whole(tensor.f16_f32),
        |s| Some(flop(16, 8, 16) / s.clocks("mma.m16n8k16 rate")?);
    "memory.l1_bandwidth", "shared memory of an SM, bytes a clock", Whole(memory.l1_bandwidth),
        |s| Some(512.0 / s.clocks("ld.shared.v4 rate, 16 warps")?);
    "memory.lsu_lanes", "addresses that an SM takes, lanes a clock", Whole(memory.lsu_lanes),
        |s| s.lanes("ld.shared.b32 rate, 1 ways, 16 warps", 1.0);
    "memory.l2_bandwidth", "L2 to all SMs, bytes a clock", Whole(memory.l2_bandwidth),
        |s| Some(s.sms * 512.0 / s.clocks("512 bytes from L2, every SM")?);
    "memory.l2_port", "L2 to one SM, bytes a clock", Whole(memory.l2_port),
        |s| Some(512.0 / s.clocks("512 bytes from L2, one SM")?);
    "memory.dram_gbps", "DRAM, GB/s, of which nine tenths are had", Real(memory.dram_gbps),
        |s| Some(s.sms * 512.0 / s.clocks("512 bytes from DRAM, every SM")? * s.clock_mhz * 1e-3 / DRAM_EFFICIENCY);
    "launch_us", "an empty kernel in a graph, µs", Real(launch_us), |s| s.launch_us;
    "sms", "SMs", Whole(sms), |s| Some(s.sms);
    "clock_mhz", "clock of the SMs, MHz", Real(clock_mhz), |s| Some(s.clock_mhz);
};

/// The rule for `wgmma`, a unit that not every machine has.
const WGMMA: Rule = Rule {
    name: "units.wgmma.f16_f32",
    what: "wgmma of an SM, FLOP a clock",
    // Four warps issue the product together.
    value: |s| Some(flop(64, 128, 16) / (4.0 * s.clocks("wgmma.m64n128k16 rate")?)),
    place: |gpu| gpu.units.as_mut().map_or(Place::Nowhere, |units| Place::Whole(&mut units.wgmma.f16_f32)),
};

impl Description {
    /// The description from measurements on a device: probes, and the time of an empty kernel in a graph, µs.
    pub fn of(device: &DeviceProperties, rows: &[Row], launch_us: Option<f64>) -> Description {
        let base = base(&device.name, device.sm);
        let mut machine = Gpu { sm: device.sm, ..base.clone() };
        if Gpu::of_device(&device.name).is_none() {
            machine.name = Box::leak(device.name.clone().into_boxed_str());
            machine.memory.l2_bytes =
                if device.l2_bytes > 0 { device.l2_bytes } else { base.memory.l2_bytes };
        }
        let clock_mhz = device.clock_mhz.unwrap_or(base.clock_mhz);
        let seen = Seen { rows, launch_us, sms: f64::from(device.sms), clock_mhz };
        let mut constants = Vec::new();
        for rule in RULES.iter().chain([&WGMMA]) {
            let Some(table) = (rule.place)(&mut base.clone()).get() else { continue };
            let measured = (rule.value)(&seen);
            if let Some(value) = measured {
                (rule.place)(&mut machine).set(value);
            }
            constants.push(Constant { name: rule.name, what: rule.what, table, measured });
        }
        Description { machine, base: base.name, constants }
    }

    /// The JSON file: the machine first, then its sources.
    pub fn json(&self, rows: &[Row], provenance: Value) -> Value {
        json!({
            "machine": self.machine, "base": self.base, "constants": self.constants, "probes": rows,
            "provenance": provenance,
        })
    }
}

/// The table's machine for the device, or one of the same kind.
pub fn base(name: &str, sm: u32) -> &'static Gpu {
    // Among equal ones, the first of the table.
    let alike = || MACHINES.into_iter().rev().filter(|gpu| gpu.sm <= sm).max_by_key(|gpu| gpu.sm);
    Gpu::of_device(name).or_else(alike).unwrap_or(&L4)
}

/// An empty kernel with a CTA of four warps for each SM.
///
/// # Errors
/// When the verifier rejects it, which is a fault of this program.
pub fn empty(target: Target, sms: u32) -> Result<Kernel, Violations> {
    let one = Dim3(1, 1, 1);
    Ok(Kernel {
        module: Builder::kernel("empty").into_verified(target)?,
        entry: "empty".to_owned(),
        launch: Launch { cluster: one, ..Launch::new(Dim3(sms, 1, 1), Dim3(128, 1, 1)) },
        buffers: Vec::new(),
        args: Vec::new(),
        tensor_maps: Vec::new(),
    })
}

/// The row of a measurement with the model's prediction.
pub fn row(probe: &super::Probe, figure: Figure, forecast: Option<Figure>) -> Row {
    let forecast = forecast.map(|figure| figure.clocks);
    Row { probe: probe.name.clone(), kind: probe.kind, clocks: figure.clocks, forecast }
}

#[cfg(test)]
mod tests {
    use predict::machine::H200;

    use super::*;
    use crate::probes::all;

    fn h200() -> DeviceProperties {
        DeviceProperties { name: "NVIDIA H200".into(), sm: 90, sms: 132, l2_bytes: 60 << 20, clock_mhz: None }
    }

    /// The rows measured on an H200 give the table's constants.
    #[test]
    fn the_evidence_gives_the_table() {
        let text = include_str!("../../../../evidence/model.jsonl");
        let values: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let measured = values.iter().filter(|row| row["suite"] == "model" && row["clocks"].is_number());
        let rows: Vec<Row> = measured
            .map(|row| Row {
                probe: row["probe"].as_str().unwrap().to_owned(),
                kind: Kind::Rate,
                clocks: row["clocks"].as_f64().unwrap(),
                forecast: None,
            })
            .collect();
        let found = Description::of(&h200(), &rows, None);
        assert_eq!((found.base, found.machine.name), ("H200", "H200"));
        found.machine.check().unwrap();
        let told: Vec<&Constant> =
            found.constants.iter().filter(|constant| constant.measured.is_some()).collect();
        assert!(told.len() > 20, "{} constants", told.len());
        for constant in told {
            let ratio = constant.measured.unwrap() / constant.table;
            // The table's bandwidth is the data sheet's, not a measured one.
            let near = if constant.name == "memory.dram_gbps" { 0.05 } else { 0.02 };
            assert!((ratio - 1.0).abs() < near, "{constant:?}");
        }
        assert_eq!(found.machine.latency, H200.latency);
        assert_eq!((found.machine.rates.fma, found.machine.tensor), (H200.rates.fma, H200.tensor));
    }

    /// Every rule names existing probes, and constants that were not measured stay the table's.
    #[test]
    fn a_constant_needs_its_probes() {
        let target = Target::of_device(90);
        let rows: Vec<Row> = all(target)
            .iter()
            .map(|probe| Row { probe: probe.name.clone(), kind: probe.kind, clocks: 2.0, forecast: None })
            .collect();
        let found = Description::of(&h200(), &rows, Some(2.5));
        assert_eq!(found.constants.len(), RULES.len() + 1);
        assert!(found.constants.iter().all(|constant| constant.measured.is_some()), "{:?}", found.constants);
        assert_eq!((found.machine.latency.dram, found.machine.launch_us), (2, 2.5));
        assert_eq!(Description::of(&h200(), &[], None).machine, H200);
        let unknown = DeviceProperties { name: "NVIDIA B300".into(), sm: 103, sms: 160, ..h200() };
        let found = Description::of(&unknown, &[], None);
        assert_eq!((found.machine.name, found.machine.sm, found.machine.sms), ("NVIDIA B300", 103, 160));
        assert_eq!(found.machine.memory.l2_bytes, 60 << 20);
    }
}
