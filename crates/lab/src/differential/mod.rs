//! The emulator's tensor cores against a machine's, bit for bit, on random fragments.

mod kernel;

use emu::numerics::tensor::{self, Accumulator, Distribution, MmaKind, TensorRules};
use ptx::{Machine, Target};
use rayon::prelude::*;
use serde::Serialize;

use kernel::{WARPS_PER_CTA, mma_kernel};

/// Fragments in one launch: enough to fill a large GPU, little enough for its buffers to stay under 100 MB.
const BATCH: u64 = 65_536;

/// The outcome for one kind of `mma.sync`.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The instruction's mnemonic.
    pub instruction: String,
    /// Fragments compared.
    pub fragments: u64,
    /// 32-bit or 64-bit result registers compared (lanes × registers).
    pub results: u64,
    /// Results whose bits differ.
    pub differing: u64,
    /// The first difference.
    pub first: Option<Difference>,
}

/// One result that differs.
#[derive(Clone, Debug, Serialize)]
pub struct Difference {
    /// How the fragment was drawn.
    pub distribution: String,
    /// Its seed.
    pub seed: u64,
    /// Lane of the warp.
    pub lane: usize,
    /// Result register.
    pub register: usize,
    /// The emulator's bits.
    pub emulated: String,
    /// The machine's bits.
    pub machine: String,
}

/// Why two machines could not be compared.
#[derive(Debug, thiserror::Error)]
pub enum CompareError<E: std::error::Error> {
    /// The machine failed.
    #[error("{instruction}: {source}")]
    Machine {
        /// The instruction.
        instruction: String,
        /// What the machine said.
        source: E,
    },
    /// The emulator refused the instruction.
    #[error(transparent)]
    Emulator(#[from] tensor::MmaError),
}

/// The kinds of `mma.sync` that exist on an architecture.
pub fn kinds(rules: TensorRules) -> Vec<MmaKind> {
    MmaKind::all().into_iter().filter(|kind| kind.check(rules).is_ok()).collect()
}

/// Compares `fragments` random fragments (rounded up to whole batches) of one kind, an equal share from each
/// distribution.
///
/// # Errors
/// When the machine fails or the emulator does not have the instruction.
pub fn compare_mma<M: Machine>(
    machine: &mut M,
    target: Target,
    rules: TensorRules,
    kind: MmaKind,
    fragments: u64,
) -> Result<Comparison, CompareError<M::Error>> {
    let wide = kind.accumulator() == Accumulator::F64;
    let (module, op) = mma_kernel(kind, target);
    let mut comparison =
        Comparison { instruction: op.to_string(), fragments: 0, results: 0, differing: 0, first: None };
    let batch = BATCH.min(fragments.next_multiple_of(WARPS_PER_CTA));
    let kernel = kernel::launch(kind, module, batch);
    let failed = |source| CompareError::Machine { instruction: op.to_string(), source };
    let mut buffers = Vec::new();
    for spec in &kernel.buffers {
        buffers.push(machine.allocate(spec.bytes).map_err(failed)?);
    }
    for (round, first_seed) in (0..fragments).step_by(batch as usize).enumerate() {
        let distribution = Distribution::ALL[round % Distribution::ALL.len()];
        let drawn: Vec<Drawn> = (first_seed..first_seed + batch)
            .into_par_iter()
            .map(|seed| Drawn::new(kind, rules, distribution, seed, wide))
            .collect::<Result<_, _>>()?;
        for (operand, buffer) in buffers.iter_mut().take(3).enumerate() {
            let bytes: Vec<u8> = drawn.iter().flat_map(|d| d.inputs[operand].iter().copied()).collect();
            machine.upload(buffer, &bytes).map_err(failed)?;
        }
        let mut handles: Vec<&mut M::Buffer> = buffers.iter_mut().collect();
        machine.launch(&kernel, &mut handles).map_err(failed)?;
        let mut results = vec![0u8; kernel.buffers[3].bytes];
        machine.download(&buffers[3], &mut results).map_err(failed)?;
        for (d, got) in drawn.iter().zip(results.chunks_exact(drawn[0].expected.len())) {
            comparison.count(d, got, distribution, if wide { 8 } else { 4 });
        }
    }
    Ok(comparison)
}

impl Comparison {
    fn count(&mut self, drawn: &Drawn, got: &[u8], distribution: Distribution, width: usize) {
        self.fragments += 1;
        for (i, (want, have)) in drawn.expected.chunks_exact(width).zip(got.chunks_exact(width)).enumerate() {
            self.results += 1;
            if want == have {
                continue;
            }
            self.differing += 1;
            self.first.get_or_insert_with(|| Difference {
                distribution: format!("{distribution:?}"),
                seed: drawn.seed,
                lane: i % 32,
                register: i / 32,
                emulated: hex(want),
                machine: hex(have),
            });
        }
    }
}

fn hex(little_endian: &[u8]) -> String {
    little_endian.iter().rev().map(|byte| format!("{byte:02x}")).collect()
}

/// A fragment in memory order (register, then lane) with the emulator's result.
struct Drawn {
    seed: u64,
    inputs: [Vec<u8>; 3],
    expected: Vec<u8>,
}

impl Drawn {
    fn new(
        kind: MmaKind,
        rules: TensorRules,
        distribution: Distribution,
        seed: u64,
        wide: bool,
    ) -> Result<Drawn, tensor::MmaError> {
        if wide {
            let f = tensor::random_fragment_f64(kind, distribution, seed);
            let mut d = f.c.clone();
            tensor::mma_f64(kind, rules, &f.a, &f.b, &f.c, &mut d)?;
            let bytes =
                |regs: &[[u64; 32]]| regs.as_flattened().iter().flat_map(|w| w.to_le_bytes()).collect();
            Ok(Drawn { seed, inputs: [bytes(&f.a), bytes(&f.b), bytes(&f.c)], expected: bytes(&d) })
        } else {
            let f = tensor::random_fragment(kind, distribution, seed);
            let mut d = f.c.clone();
            tensor::mma(kind, rules, &f.a, &f.b, &f.c, &mut d)?;
            let bytes =
                |regs: &[[u32; 32]]| regs.as_flattened().iter().flat_map(|w| w.to_le_bytes()).collect();
            Ok(Drawn { seed, inputs: [bytes(&f.a), bytes(&f.b), bytes(&f.c)], expected: bytes(&d) })
        }
    }
}
