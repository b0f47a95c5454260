//! Runs `filetests/run` and `filetests/hazard` (see `flashcore_filetest`): PTX with the launch and the
//! expected results in comments.
//!
//! ```text
//! // launch: grid=2 block=64 shared=1024        (shared: dynamic, 0 unless given; cluster=2, overlapping=1,
//!                                             declared=1 for `Placement::Declared`, collectives_order=1,
//!                                             resident=4; letter=0 for `by_the_letter`; every=1: each
//!                                             hazard is reported by every
//!                                             schedule; the entry is `k` if there is one, else the first)
//! // buffer: out 256 write                      (name, bytes, read|write|readwrite, and for the latter two
//! // buffer: in 256 read iota                    zeros|iota|uninitialised: words counting from 0)
//! // earlier: in written                         (what earlier launches do to it: untouched|read|written)
//! // map: m in f16 64,32 128 64,16 128          (name, buffer, element, extents, strides or -, box, swizzle)
//! // arg: out                                   (a buffer, `buffer+bytes`, `map` and its name, or
//! //                                             u32/i32/f32 and a value)
//! // expect: out u32 0 1 2                      (first words after the run; f32 too)
//! // printed: n = 3                             (what the kernel prints, all of it)
//! st.shared.u32 [%r1], %r2;  // hazard: race    (on the line of either access)
//! // hazard: unwritten_output                   (on a line of its own: for the whole kernel)
//! ```
//!
//! No schedule may report a hazard that is not announced, and each announced hazard must be reported by some
//! schedule.

use std::collections::BTreeSet;

use flashcore_emu::{Buffer, EarlierUse, EarlierUses, EmuError, Options, Placement, Report, Schedule, run};
use ptx::{Access, Arg, BufferSpec, Dim3, Element, Kernel, L2Promotion, Launch, Swizzle, TensorMapSpec};

struct Case {
    kernel: Kernel,
    maps: Vec<String>,
    contents: Vec<Option<Vec<u8>>>,
    expected: Vec<(usize, Vec<u32>)>,
    /// Kind and line. Line 0 stands for the whole kernel.
    hazards: BTreeSet<(String, u32)>,
    error: Option<String>,
    step_limit: Option<u64>,
    grid_limit: Option<u64>,
    placement: Placement,
    collectives_order: bool,
    resident: Option<u64>,
    earlier: EarlierUses,
    by_the_letter: bool,
    /// Whether each hazard must be reported by every schedule.
    every: bool,
    printed: Vec<String>,
}

fn number<T: std::str::FromStr>(text: &str) -> T {
    text.parse().unwrap_or_else(|_| panic!("`{text}` is no number"))
}

fn word(kind: &str, text: &str) -> u32 {
    match kind {
        "f32" => number::<f32>(text).to_bits(),
        "i32" => number::<i32>(text) as u32,
        _ if text.starts_with("0x") => u32::from_str_radix(&text[2..], 16).expect("a hexadecimal number"),
        _ => number(text),
    }
}

fn read(text: &str) -> Case {
    let module = ptx::parse(text).unwrap_or_else(|e| panic!("{e}"));
    let entries: Vec<String> = module.entries().map(|entry| entry.name.to_string()).collect();
    let entry = entries.iter().find(|name| *name == "k").unwrap_or(&entries[0]).clone();
    let launch = Launch::new(Dim3(1, 1, 1), Dim3(32, 1, 1));
    // Some hazards are in modules that the verifier refuses.
    let module = module.assume_verified();
    let kernel =
        Kernel { tensor_maps: Vec::new(), module, entry, launch, buffers: Vec::new(), args: Vec::new() };
    let mut case = Case {
        kernel,
        maps: Vec::new(),
        contents: Vec::new(),
        expected: Vec::new(),
        hazards: BTreeSet::new(),
        error: None,
        step_limit: None,
        grid_limit: None,
        placement: Placement::Ptxas,
        collectives_order: false,
        resident: None,
        earlier: EarlierUses::default(),
        by_the_letter: true,
        every: false,
        printed: Vec::new(),
    };
    for (index, line) in text.lines().enumerate() {
        let Some((code, comment)) = line.split_once("//") else { continue };
        let Some((key, value)) = comment.trim().split_once(':') else { continue };
        let words: Vec<&str> = value.split_whitespace().collect();
        let at = if code.trim().is_empty() { 0 } else { index as u32 + 1 };
        case.directive(key, &words, at);
    }
    case
}

impl Case {
    fn directive(&mut self, key: &str, words: &[&str], line: u32) {
        match (key, words) {
            ("launch", settings) => settings.iter().for_each(|s| self.launch(s)),
            ("buffer", [name, bytes, access, init @ ..]) => self.buffer(name, number(bytes), access, init),
            ("earlier", [name, state]) => {
                let state = match *state {
                    "untouched" => EarlierUse::Untouched,
                    "read" => EarlierUse::Read,
                    "written" => EarlierUse::Written,
                    other => panic!("`{other}` is no use of a buffer"),
                };
                self.earlier.state(self.index(name), state);
            }
            ("map", [name, buffer, rest @ ..]) => self.map(name, buffer, rest),
            ("arg", ["map", name]) => {
                let index = self.maps.iter().position(|m| m == name).expect("a map of that name");
                self.kernel.args.push(Arg::TensorMap { index });
            }
            ("arg", [kind, value]) => self.kernel.args.push(match *kind {
                "f32" => Arg::F32(number(value)),
                "i32" => Arg::I32(number(value)),
                _ => Arg::U32(number(value)),
            }),
            ("arg", [name]) => {
                let (name, offset) = name.split_once('+').unwrap_or((name, "0"));
                let index = self.index(name);
                self.kernel.args.push(Arg::Buffer { index, offset: number(offset) });
            }
            ("expect", [name, kind, values @ ..]) => {
                let values = values.iter().map(|v| word(kind, v)).collect();
                self.expected.push((self.index(name), values));
            }
            ("hazard", kinds) => {
                self.hazards.extend(kinds.iter().map(|k| (k.to_string(), line)));
            }
            ("printed", words) => self.printed.push(words.join(" ")),
            ("error", words) => self.error = Some(words.join(" ")),
            ("steps", [limit]) => self.step_limit = Some(number(limit)),
            ("grid_steps", [limit]) => self.grid_limit = Some(number(limit)),
            _ => {}
        }
    }

    fn map(&mut self, name: &str, buffer: &str, rest: &[&str]) {
        let [element, extents, strides, boxes, swizzle, wraps @ ..] = rest else {
            panic!("a map has five properties, and `wraps`")
        };
        fn list<T: std::str::FromStr>(text: &str) -> Vec<T> {
            text.split(',').filter(|n| *n != "-").map(number).collect()
        }
        let element = match *element {
            "f16" => Element::F16,
            "f32" => Element::F32,
            "u32" => Element::U32,
            other => panic!("`{other}` is no element"),
        };
        let swizzle = match *swizzle {
            "128" => Swizzle::Bytes128,
            "64" => Swizzle::Bytes64,
            "32" => Swizzle::Bytes32,
            _ => Swizzle::None,
        };
        self.maps.push(name.to_string());
        let (buffer, l2_promotion) = (self.index(buffer), L2Promotion::None);
        let (extents, strides, box_extents) = (list(extents), list(strides), list(boxes));
        let spec = TensorMapSpec {
            buffer,
            offset: 0,
            element,
            extents,
            strides,
            box_extents,
            swizzle,
            l2_promotion,
            wraps: !wraps.is_empty(),
        };
        self.kernel.tensor_maps.push(spec);
    }

    fn index(&self, name: &str) -> usize {
        self.kernel
            .buffers
            .iter()
            .position(|b| b.name == name)
            .unwrap_or_else(|| panic!("no buffer `{name}`"))
    }

    fn launch(&mut self, setting: &str) {
        let (key, value) = setting.split_once('=').expect("key=value");
        let mut extents = value.split(',').map(number);
        let mut next = || extents.next().unwrap_or(1);
        match key {
            "grid" => self.kernel.launch.grid = Dim3(next(), next(), next()),
            "cluster" => self.kernel.launch.cluster = Dim3(next(), next(), next()),
            "block" => self.kernel.launch.block = Dim3(next(), next(), next()),
            "shared" => self.kernel.launch.dynamic_shared = next(),
            "overlapping" => self.kernel.launch.overlapping = next() == 1,
            "collectives_order" => self.collectives_order = next() == 1,
            "resident" => self.resident = Some(next().into()),
            "letter" => self.by_the_letter = next() == 1,
            "every" => self.every = next() == 1,
            "declared" if next() == 1 => self.placement = Placement::Declared,
            _ => panic!("`{key}` is no setting of a launch"),
        }
    }

    fn buffer(&mut self, name: &str, bytes: usize, access: &str, init: &[&str]) {
        let access = match access {
            "read" => Access::Read,
            "write" => Access::Write,
            _ => Access::ReadWrite,
        };
        self.kernel.buffers.push(BufferSpec { name: name.to_string(), bytes, access });
        self.contents.push(match init {
            ["zeros"] => Some(vec![0; bytes]),
            ["iota"] => Some((0..bytes as u32 / 4).flat_map(u32::to_le_bytes).collect()),
            _ => None,
        });
    }

    fn run(
        &self,
        schedule: Schedule,
        seed: u64,
        first: Option<u64>,
    ) -> Result<(Report, Vec<Buffer>), EmuError> {
        let mut buffers: Vec<Buffer> = self
            .kernel
            .buffers
            .iter()
            .zip(&self.contents)
            .map(|(spec, contents)| match contents {
                Some(bytes) => Buffer::from_bytes(bytes),
                None => Buffer::uninitialised(spec.bytes),
            })
            .collect();
        let (placement, collectives_order) = (self.placement, self.collectives_order);
        let resident = self.resident;
        let mut options =
            Options { seed, schedule, placement, collectives_order, resident, first, ..Options::default() };
        (options.earlier, options.by_the_letter) = (self.earlier.clone(), self.by_the_letter);
        options.step_limit = self.step_limit.unwrap_or(options.step_limit);
        options.grid_limit = self.grid_limit.unwrap_or(options.grid_limit);
        let report = run(&self.kernel, &mut buffers.iter_mut().collect::<Vec<_>>(), &options)?;
        Ok((report, buffers))
    }

    /// Runs every schedule. Returns a description of what is wrong.
    fn judge(&self) -> Result<(), String> {
        let mut missing = self.hazards.clone();
        let last = self.kernel.launch.grid.count().saturating_sub(1);
        let schedules = [
            (Schedule::Late, 0, None),
            (Schedule::Late, 1, None),
            (Schedule::Early, 2, None),
            (Schedule::Random, 3, None),
            (Schedule::Random, 4, None),
            // The other CTAs start late.
            (Schedule::Late, 5, Some(0)),
            (Schedule::Random, 6, Some(last / 2)),
            (Schedule::Early, 7, Some(last)),
        ];
        // In a kernel with hazards, the lagging warp decides which consequence is seen first, so only correct
        // kernels run with these schedules.
        let schedules =
            schedules.into_iter().filter(|(.., first)| first.is_none() || self.resident.is_none());
        let lagging = [(Schedule::Lagging, 0, None), (Schedule::Lagging, 1, None)];
        let lagging = lagging.into_iter().filter(|_| self.hazards.is_empty());
        for (schedule, seed, first) in schedules.chain(lagging) {
            let (report, buffers) = match (self.run(schedule, seed, first), &self.error) {
                (Err(error), Some(expected)) if error.to_string().contains(expected) => continue,
                (Err(error), _) => return Err(error.to_string()),
                (Ok(_), Some(expected)) => return Err(format!("no error, where `{expected}` was announced")),
                (Ok(run), None) => run,
            };
            if self.every {
                missing.clone_from(&self.hazards);
            }
            for hazard in &report.hazards {
                let lines = [Some(hazard.line), hazard.other_line];
                let announced: Vec<_> = lines
                    .into_iter()
                    .flatten()
                    .map(|line| (hazard.kind.name().to_string(), line))
                    .filter(|key| self.hazards.contains(key))
                    .collect();
                if announced.is_empty() {
                    return Err(format!("{schedule:?} {seed}: {hazard}"));
                }
                announced.iter().for_each(|key| {
                    missing.remove(key);
                });
            }
            if self.every && !missing.is_empty() {
                return Err(format!("{schedule:?} {seed}: not found: {missing:?}"));
            }
            let printed: Vec<&str> = report.printed.iter().map(|printed| &*printed.text).collect();
            if printed != self.printed {
                return Err(format!("{schedule:?} {seed}: printed {printed:?}"));
            }
            for (index, words) in &self.expected {
                let bytes = buffers[*index].to_bytes();
                let got: Vec<u32> = bytes
                    .chunks_exact(4)
                    .take(words.len())
                    .map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]]))
                    .collect();
                if got != *words {
                    let name = &self.kernel.buffers[*index].name;
                    return Err(format!("{schedule:?} {seed}: {name} is {got:x?}, not {words:x?}"));
                }
            }
        }
        if missing.is_empty() { Ok(()) } else { Err(format!("not found: {missing:?}")) }
    }
}

fn hazard_case(case: &filetest::Case) -> Result<(), String> {
    read(&case.text).judge()
}

fn run_case(case: &filetest::Case) -> Result<(), String> {
    let case = read(&case.text);
    if !case.hazards.is_empty() {
        return Err("a file that announces hazards belongs to filetests/hazard".into());
    }
    case.judge()
}

fn main() {
    filetest::main(&[("run", run_case), ("hazard", hazard_case)]);
}
