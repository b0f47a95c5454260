//! Tests of the kernels in `filetests/corpus`, which NVRTC and Triton compiled from sources of this project.
//! They must give correct results without hazards, in every schedule, on ragged shapes.

mod cuda;
mod hopper;
mod reference;
mod triton;

use flashcore_emu::{Buffer, Options, Schedule, run};
use half::{bf16, f16};
use ptx::{Access, Arg, BufferSpec, Dim3, Kernel, Launch};

/// The contents of a buffer, or its size if the kernel writes it.
enum Data {
    In(Vec<u8>),
    InOut(Vec<u8>),
    Out(usize),
}

fn words<T: Copy, const N: usize>(values: &[T], to: fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|v| to(*v)).collect()
}

fn floats(values: &[f32]) -> Data {
    Data::In(words(values, f32::to_le_bytes))
}

fn halves(values: &[f32]) -> Data {
    Data::In(words(values, |v| f16::from_f32(v).to_le_bytes()))
}

fn brains(values: &[f32]) -> Data {
    Data::In(words(values, |v| bf16::from_f32(v).to_le_bytes()))
}

fn integers(values: &[i32]) -> Data {
    Data::In(words(values, i32::to_le_bytes))
}

/// Numbers between −1 and 1 from a linear congruential generator. They are exact in f16 and in bf16.
fn draw(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::from_f32((state >> 8) as f32 / (1 << 23) as f32 - 1.0).to_f32()
    };
    (0..count).map(|_| next()).collect()
}

struct Case {
    /// File of the corpus, without the target in its name.
    file: String,
    entry: &'static str,
    grid: Dim3,
    block: Dim3,
    shared: u32,
    data: Vec<(&'static str, Data)>,
    /// Scalar arguments, which follow the buffers in the argument list.
    scalars: Vec<Arg>,
}

impl Case {
    /// Runs every schedule on sm_80 and sm_89 and passes the buffers of each result to `check`.
    fn check(&self, check: impl Fn(&[Vec<u8>])) {
        self.check_on(&["80", "89"], check);
    }

    /// Like [`Case::check`], on other targets.
    fn check_on(&self, targets: &[&str], check: impl Fn(&[Vec<u8>])) {
        for sm in targets {
            if let Some(kernel) = self.kernel(sm) {
                self.check_kernel(&kernel, &check);
            }
        }
    }

    /// Like [`Case::check`], for one kernel.
    fn check_kernel(&self, kernel: &Kernel, check: impl Fn(&[Vec<u8>])) {
        self.each_schedule(kernel, |hazards, buffers| {
            assert!(hazards.is_empty(), "{} {}: {hazards:#?}", self.file, kernel.module.target);
            check(buffers);
        });
    }

    /// Runs every schedule and passes the findings and the buffers to `check`.
    fn each_schedule(&self, kernel: &Kernel, check: impl Fn(&[String], &[Vec<u8>])) {
        for (schedule, seed) in [(Schedule::Late, 0), (Schedule::Early, 1), (Schedule::Random, 2)] {
            let mut buffers: Vec<Buffer> = self
                .data
                .iter()
                .map(|(_, data)| match data {
                    Data::In(bytes) | Data::InOut(bytes) => Buffer::from_bytes(bytes),
                    Data::Out(bytes) => Buffer::uninitialised(*bytes),
                })
                .collect();
            // Triton emits no `tcgen05.fence`.
            let by_the_letter = kernel.module.target.sm < 100;
            let options = Options { seed, schedule, by_the_letter, ..Options::default() };
            let report = run(kernel, &mut buffers.iter_mut().collect::<Vec<_>>(), &options)
                .unwrap_or_else(|e| panic!("{} {}: {e}", self.file, kernel.module.target));
            let fails = report.hazards.iter().filter(|h| h.fails());
            let found: Vec<String> = fails.map(|h| format!("{schedule:?}: {h}")).collect();
            check(&found, &buffers.iter().map(Buffer::to_bytes).collect::<Vec<_>>());
        }
    }

    /// The kernel for a target; `None` where NVRTC is needed and not installed.
    fn kernel(&self, sm: &str) -> Option<Kernel> {
        let text = filetest::corpus(&format!("{}_sm{sm}", self.file))?;
        let buffers: Vec<BufferSpec> = self
            .data
            .iter()
            .map(|(name, data)| {
                let (bytes, access) = match data {
                    Data::In(bytes) => (bytes.len(), Access::Read),
                    Data::InOut(bytes) => (bytes.len(), Access::ReadWrite),
                    Data::Out(bytes) => (*bytes, Access::Write),
                };
                BufferSpec { name: name.to_string(), bytes, access }
            })
            .collect();
        let pointers = (0..buffers.len()).map(|index| Arg::Buffer { index, offset: 0 });
        Some(Kernel {
            module: ptx::parse(&text).unwrap_or_else(|e| panic!("{}: {e}", self.file)).verify().unwrap(),
            entry: self.entry.to_string(),
            launch: Launch { dynamic_shared: self.shared, ..Launch::new(self.grid, self.block) },
            tensor_maps: Vec::new(),
            args: pointers.chain(self.scalars.iter().cloned()).collect(),
            buffers,
        })
    }
}

fn read<T, const N: usize>(bytes: &[u8], from: fn([u8; N]) -> T) -> Vec<T> {
    bytes.chunks_exact(N).map(|c| from(c.try_into().expect("the right length"))).collect()
}

fn assert_close(name: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!((g - e).abs() <= tolerance, "{name}[{i}] is {g}, not {e}");
    }
}

fn f32s(bytes: &[u8]) -> Vec<f64> {
    read(bytes, f32::from_le_bytes).into_iter().map(f64::from).collect()
}

fn f16s(bytes: &[u8]) -> Vec<f64> {
    read(bytes, f16::from_le_bytes).into_iter().map(f64::from).collect()
}

fn bf16s(bytes: &[u8]) -> Vec<f64> {
    read(bytes, bf16::from_le_bytes).into_iter().map(f64::from).collect()
}
