//! The emulator's tensor cores against a machine's, bit for bit, on random fragments.

mod kernel;

use emu::numerics::tensor::{self, Distribution, MmaKind, TensorRules};
use ptx::{Kernel, Machine, Target};
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
    let mut batch_data = Batch::new(&kernel, batch, kernel::register_bytes(kind));
    for (round, first_seed) in (0..fragments).step_by(batch as usize).enumerate() {
        let distribution = Distribution::ALL[round % Distribution::ALL.len()];
        batch_data.draw(kind, rules, distribution, first_seed)?;
        for (buffer, bytes) in buffers.iter_mut().zip(&batch_data.inputs) {
            machine.upload(buffer, bytes).map_err(failed)?;
        }
        let mut handles: Vec<&mut M::Buffer> = buffers.iter_mut().collect();
        machine.launch(&kernel, &mut handles).map_err(failed)?;
        machine.download(&buffers[3], &mut batch_data.results).map_err(failed)?;
        comparison.fragments += batch;
        comparison.results += batch_data.results.len() as u64 / batch_data.width as u64;
        for difference in batch_data.differences(distribution, first_seed) {
            comparison.differing += 1;
            comparison.first.get_or_insert(difference);
        }
    }
    Ok(comparison)
}

/// One launch's fragments in memory order: fragment, register, lane.
struct Batch {
    inputs: [Vec<u8>; 3],
    expected: Vec<u8>,
    results: Vec<u8>,
    /// Bytes per fragment of A, B, C and D.
    strides: [usize; 4],
    /// Bytes of a register.
    width: usize,
}

impl Batch {
    fn new(kernel: &Kernel, batch: u64, width: usize) -> Batch {
        let bytes = |i: usize| kernel.buffers[i].bytes;
        Batch {
            inputs: [0, 1, 2].map(|i| vec![0; bytes(i)]),
            expected: vec![0; bytes(3)],
            results: vec![0; bytes(3)],
            strides: [0, 1, 2, 3].map(|i| bytes(i) / batch as usize),
            width,
        }
    }

    /// Draws every fragment and computes what the emulator says of it.
    fn draw(
        &mut self,
        kind: MmaKind,
        rules: TensorRules,
        distribution: Distribution,
        first_seed: u64,
    ) -> Result<(), tensor::MmaError> {
        let wide = self.width == 8;
        let [a, b, c] = &mut self.inputs;
        let [sa, sb, sc, sd] = self.strides;
        let places = a.par_chunks_mut(sa).zip(b.par_chunks_mut(sb)).zip(c.par_chunks_mut(sc));
        places.zip(self.expected.par_chunks_mut(sd)).enumerate().try_for_each(|(i, (((a, b), c), d))| {
            let seed = first_seed + i as u64;
            if wide {
                let f = tensor::random_fragment_f64(kind, distribution, seed);
                let mut result = f.c.clone();
                tensor::mma_f64(kind, rules, &f.a, &f.b, &f.c, &mut result)?;
                for (to, from) in [(a, &f.a), (b, &f.b), (c, &f.c), (d, &result)] {
                    store(to, from.as_flattened(), |w| w.to_le_bytes());
                }
            } else {
                let f = tensor::random_fragment(kind, distribution, seed);
                let mut result = f.c.clone();
                tensor::mma(kind, rules, &f.a, &f.b, &f.c, &mut result)?;
                for (to, from) in [(a, &f.a), (b, &f.b), (c, &f.c), (d, &result)] {
                    store(to, from.as_flattened(), |w| w.to_le_bytes());
                }
            }
            Ok(())
        })
    }

    /// Where the machine's results differ, in order of seed, register and lane.
    fn differences(&self, distribution: Distribution, first_seed: u64) -> Vec<Difference> {
        let (stride, width) = (self.strides[3], self.width);
        let of_fragment = |(i, (want, have)): (usize, (&[u8], &[u8]))| {
            let pairs = want.chunks_exact(width).zip(have.chunks_exact(width)).enumerate();
            let differing = if want == have { 0 } else { usize::MAX };
            pairs
                .take(differing)
                .filter(|(_, (want, have))| want != have)
                .map(|(place, (want, have))| Difference {
                    distribution: format!("{distribution:?}"),
                    seed: first_seed + i as u64,
                    lane: place % 32,
                    register: place / 32,
                    emulated: hex(want),
                    machine: hex(have),
                })
                .collect::<Vec<_>>()
        };
        let pairs = self.expected.par_chunks(stride).zip(self.results.par_chunks(stride));
        pairs.enumerate().flat_map_iter(of_fragment).collect()
    }
}

fn store<W: Copy, const N: usize>(to: &mut [u8], from: &[W], bytes: fn(W) -> [u8; N]) {
    for (to, from) in to.chunks_exact_mut(N).zip(from) {
        to.copy_from_slice(&bytes(*from));
    }
}

fn hex(little_endian: &[u8]) -> String {
    little_endian.iter().rev().map(|byte| format!("{byte:02x}")).collect()
}
