//! The validated launch file.

use std::fmt;
use std::str::FromStr;

use problem::{Band, DType, Layout, Pass, Problem, Tensor};
use ptx::{Arg, Dim3};

use super::LaunchError;
use super::map::{MapSpec, MapTarget, map_of};
use super::raw::{RawArg, RawFile, RawLaunch, RawProblem};

/// A validated launch file, not bound to a module yet.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchSpec {
    /// The attention problem, if the file states one. Its strides follow the arguments' layouts, and it asks
    /// for the LSE if an argument has that role.
    pub problem: Option<Problem>,
    /// The kernel's name, if the file gives one.
    pub entry: Option<String>,
    /// CTAs of the grid.
    pub grid: Dim3,
    /// CTAs per cluster.
    pub cluster: Dim3,
    /// Threads per CTA; `None` leaves it to the entry's `.reqntid`.
    pub block: Option<Dim3>,
    /// Dynamic shared memory in bytes.
    pub dynamic_shared: u32,
    /// Whether the launch is cooperative.
    pub cooperative: bool,
    /// One argument per parameter, in order.
    pub args: Vec<ArgSpec>,
}

/// The argument for one parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum ArgSpec {
    Tensor(Tensor),
    /// The log-sum-exp output, f32, `[batch][head][row]`.
    Lse,
    /// Memory outside the problem's tensors.
    Buffer(Memory),
    TensorMap(MapSpec),
    Scalar(Arg),
}

/// Memory outside the problem's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub dtype: BufferType,
    pub elements: usize,
    pub init: Init,
}

impl Memory {
    /// Size in bytes; `None` on overflow.
    pub(super) fn bytes(self) -> Option<usize> {
        self.elements.checked_mul(self.dtype.bytes())
    }
}

impl ArgSpec {
    /// The `role` as written in the file.
    pub fn role(&self) -> &'static str {
        match self {
            ArgSpec::Tensor(tensor) => tensor.name(),
            ArgSpec::Lse => "lse",
            ArgSpec::Buffer(_) => "buffer",
            ArgSpec::TensorMap(_) => "tensor_map",
            ArgSpec::Scalar(Arg::U32(_)) => "u32",
            ArgSpec::Scalar(Arg::I32(_)) => "i32",
            ArgSpec::Scalar(Arg::U64(_)) => "u64",
            ArgSpec::Scalar(Arg::I64(_)) => "i64",
            ArgSpec::Scalar(Arg::F32(_)) => "f32",
            ArgSpec::Scalar(Arg::TensorMap { .. }) => "tensor_map",
            ArgSpec::Scalar(Arg::Buffer { .. } | Arg::Null) => "buffer",
        }
    }
}

macro_rules! closed_names {
    ($(#[$doc:meta])* $type:ident, $what:literal: $($variant:ident = $name:literal),* $(,)?) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $type { $($variant),* }

        impl $type {
            /// The names accepted in a launch file.
            pub const ACCEPTED: &'static str = concat!($($name, " "),*);

            /// The name in a launch file.
            pub const fn name(self) -> &'static str {
                match self { $($type::$variant => $name),* }
            }
        }

        impl FromStr for $type {
            type Err = ();

            fn from_str(name: &str) -> Result<Self, ()> {
                match name { $($name => Ok($type::$variant),)* _ => Err(()) }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

closed_names!(
    /// Element type of a plain buffer.
    BufferType, "dtype": U8 = "u8", I8 = "i8", U16 = "u16", I16 = "i16", U32 = "u32", I32 = "i32",
    U64 = "u64", I64 = "i64", F16 = "f16", Bf16 = "bf16", F32 = "f32", F64 = "f64"
);

closed_names!(
    /// Initial contents of a plain buffer.
    Init, "init": Zeros = "zeros", Random = "random", Uninitialised = "uninitialised", Iota = "iota"
);

impl BufferType {
    pub const fn bytes(self) -> usize {
        match self {
            BufferType::U8 | BufferType::I8 => 1,
            BufferType::U16 | BufferType::I16 | BufferType::F16 | BufferType::Bf16 => 2,
            BufferType::U32 | BufferType::I32 | BufferType::F32 => 4,
            BufferType::U64 | BufferType::I64 | BufferType::F64 => 8,
        }
    }

    /// Little-endian bytes of a number, rounded or wrapped to the type.
    pub(crate) fn encode(self, value: f64) -> Vec<u8> {
        let float = value as f32;
        match self {
            BufferType::F16 => half::f16::from_f32(float).to_le_bytes().to_vec(),
            BufferType::Bf16 => half::bf16::from_f32(float).to_le_bytes().to_vec(),
            BufferType::F32 => float.to_le_bytes().to_vec(),
            BufferType::F64 => value.to_le_bytes().to_vec(),
            _ => (value as i64).to_le_bytes()[..self.bytes()].to_vec(),
        }
    }

    /// Maps `unit` in [0, 1) to a number of the type: floats in [−1, 1), integers in 0..128, which every type
    /// can represent.
    pub(crate) fn draw(self, unit: f64) -> f64 {
        match self {
            BufferType::F16 | BufferType::Bf16 | BufferType::F32 | BufferType::F64 => 2.0 * unit - 1.0,
            _ => (128.0 * unit).floor(),
        }
    }
}

/// Maximum memory of one launch, bytes: an amount that a laptop has to spare.
const MEMORY_LIMIT: usize = 4 << 30;

fn shortened(message: &str) -> String {
    message.lines().map(ptx::quote::cut).collect::<Vec<_>>().join("\n")
}

impl FromStr for LaunchSpec {
    type Err = LaunchError;

    fn from_str(text: &str) -> Result<LaunchSpec, LaunchError> {
        let file: RawFile =
            toml::from_str(text).map_err(|e| LaunchError::Syntax(shortened(&e.to_string())))?;
        let mut problem = file.problem.as_ref().map(problem_of).transpose()?;
        let args = args_of(&file.arg, problem.as_mut())?;
        if let Some(problem) = &problem {
            problem.check()?;
            check_work(problem)?;
        }
        let RawLaunch { entry, grid, cluster, block, dynamic_shared, cooperative } = file.launch;
        let spec = LaunchSpec {
            problem,
            entry,
            grid: extents("launch.grid", &grid, [i64::from(i32::MAX), 65_535, 65_535])?,
            cluster: extents("launch.cluster", &cluster.unwrap_or_else(|| vec![1]), [16, 16, 16])?,
            block: block.map(|b| extents("launch.block", &b, [1024, 1024, 64])).transpose()?,
            dynamic_shared: shared_bytes(dynamic_shared.unwrap_or(0))?,
            cooperative: cooperative.unwrap_or(false),
            args,
        };
        spec.check_judged()?;
        spec.check_extents()?;
        spec.check_memory()?;
        spec.check_maps()?;
        Ok(spec)
    }
}

impl LaunchSpec {
    /// Checks that a file with a problem has an output argument.
    fn check_judged(&self) -> Result<(), LaunchError> {
        let shows_out = |arg: &ArgSpec| match arg {
            ArgSpec::Tensor(tensor) => *tensor == Tensor::Out,
            ArgSpec::TensorMap(map) => map.target == MapTarget::Tensor(Tensor::Out),
            ArgSpec::Lse | ArgSpec::Buffer(_) | ArgSpec::Scalar(_) => false,
        };
        match self.problem {
            Some(_) if !self.args.iter().any(shows_out) => Err(LaunchError::Unjudged),
            _ => Ok(()),
        }
    }

    fn check_extents(&self) -> Result<(), LaunchError> {
        if let Some(block) = self.block.filter(|b| b.count() > 1024) {
            let accepted = "1 to 1024 threads in all";
            return Err(LaunchError::value("launch.block", block, accepted));
        }
        let (g, c) = (self.grid, self.cluster);
        if c.count() > 16 || g.0 % c.0 != 0 || g.1 % c.1 != 0 || g.2 % c.2 != 0 {
            let accepted = format!("at most 16 CTAs that divide grid = {g}");
            return Err(LaunchError::value("launch.cluster", c, accepted));
        }
        Ok(())
    }

    fn check_memory(&self) -> Result<(), LaunchError> {
        let mut total = 0usize;
        for (index, arg) in self.args.iter().enumerate() {
            let bytes = self.buffer_bytes(arg);
            total =
                bytes.and_then(|b| total.checked_add(b)).filter(|&t| t <= MEMORY_LIMIT).ok_or_else(|| {
                    let value = bytes.map_or_else(|| "more than 2^63 bytes".into(), |b| format!("{b} bytes"));
                    LaunchError::value(
                        format!("size of [[arg]] {index}"),
                        value,
                        "4 GiB for all buffers together",
                    )
                })?;
        }
        Ok(())
    }

    /// Checks that every tensor map lies within its memory and is supported by the hardware.
    fn check_maps(&self) -> Result<(), LaunchError> {
        for (index, arg) in self.args.iter().enumerate() {
            let ArgSpec::TensorMap(map) = arg else { continue };
            let bytes = match map.target {
                MapTarget::Tensor(tensor) => self.tensor_bytes(tensor),
                MapTarget::Argument(of) => self.args.get(of).and_then(|arg| self.buffer_bytes(arg)),
                MapTarget::Own(memory) => memory.bytes(),
            };
            map.check(bytes.unwrap_or(0)).map_err(|source| LaunchError::TensorMap { index, source })?;
        }
        Ok(())
    }

    /// Bytes of a tensor of the problem; `None` without a problem or on overflow.
    pub(super) fn tensor_bytes(&self, tensor: Tensor) -> Option<usize> {
        let problem = self.problem.as_ref()?;
        problem.span(tensor)?.0.checked_mul(problem.dtype.bytes())
    }

    /// Bytes of the buffer of an argument; 0 for numbers, `None` on overflow.
    pub(super) fn buffer_bytes(&self, arg: &ArgSpec) -> Option<usize> {
        let problem = self.problem.as_ref();
        match arg {
            ArgSpec::Tensor(tensor) => self.tensor_bytes(*tensor),
            ArgSpec::Lse => {
                problem.and_then(|p| p.batch.checked_mul(p.heads_q)?.checked_mul(p.seq_q)?.checked_mul(4))
            }
            ArgSpec::Buffer(memory) => memory.bytes(),
            ArgSpec::TensorMap(MapSpec { target: MapTarget::Own(memory), .. }) => memory.bytes(),
            ArgSpec::TensorMap(MapSpec { target: MapTarget::Tensor(tensor), .. }) => {
                // With an own argument for the tensor, the memory is counted there.
                let given = self.args.contains(&ArgSpec::Tensor(*tensor));
                if given { Some(0) } else { self.tensor_bytes(*tensor) }
            }
            ArgSpec::TensorMap(_) | ArgSpec::Scalar(_) => Some(0),
        }
    }
}

/// Maximum floating-point operations of the oracle: some minutes in f64 on two cores.
const WORK_LIMIT: f64 = 1e12;

fn check_work(problem: &Problem) -> Result<(), LaunchError> {
    let flops = problem.flops();
    if flops <= WORK_LIMIT {
        return Ok(());
    }
    let accepted =
        format!("at most {WORK_LIMIT:.0e} of them, so that the oracle ends in minutes; a smaller problem");
    Err(LaunchError::value("[problem]", format!("{flops:.1e} operations"), accepted))
}

fn extents(key: &str, values: &[i64], most: [i64; 3]) -> Result<Dim3, LaunchError> {
    let written = || format!("[{}]", values.iter().map(i64::to_string).collect::<Vec<_>>().join(", "));
    let accepted = || format!("one to three numbers from 1 to {}, {}, {}", most[0], most[1], most[2]);
    let fits = !values.is_empty()
        && values.len() <= 3
        && values.iter().zip(most).all(|(&value, most)| value >= 1 && value <= most);
    if !fits {
        return Err(LaunchError::value(key, written(), accepted()));
    }
    let axis = |i: usize| values.get(i).map_or(1, |&v| v as u32);
    Ok(Dim3(axis(0), axis(1), axis(2)))
}

fn shared_bytes(value: i64) -> Result<u32, LaunchError> {
    // 227 KiB is the maximum per CTA on any architecture (sm_90).
    u32::try_from(value)
        .ok()
        .filter(|&b| b <= 227 * 1024)
        .ok_or_else(|| LaunchError::value("launch.dynamic_shared", value, "0 to 232448 bytes"))
}

fn problem_of(raw: &RawProblem) -> Result<Problem, LaunchError> {
    let size = |key: &str, value: i64, least: i64| {
        usize::try_from(value)
            .ok()
            .filter(|_| value >= least)
            .ok_or_else(|| LaunchError::value(format!("problem.{key}"), value, format!("{least} or more")))
    };
    let dtype: DType = raw.dtype.parse()?;
    let heads_q = size("heads_q", raw.heads_q, 1)?;
    let seq_q = size("seq_q", raw.seq_q, 1)?;
    let batch = size("batch", raw.batch.unwrap_or(1), 1)?;
    let head_dim = size("head_dim", raw.head_dim, 1)?;
    let mut problem = Problem::new(batch, heads_q, seq_q, head_dim, dtype);
    problem.head_dim_v = raw.head_dim_v.map_or(Ok(head_dim), |d| size("head_dim_v", d, 1))?;
    problem.heads_kv = raw.heads_kv.map_or(Ok(heads_q), |h| size("heads_kv", h, 1))?;
    problem.seq_kv = raw.seq_kv.map_or(Ok(seq_q), |s| size("seq_kv", s, 0))?;
    problem.band = raw.mask.as_deref().map_or(Ok(Band::FULL), str::parse)?;
    problem.score.scale = raw.scale.map(|s| s as f32);
    problem.score.softcap = raw.softcap.map(|s| s as f32);
    Ok(problem.with_layout(Layout::Bhsd))
}

fn args_of(raw: &[RawArg], mut problem: Option<&mut Problem>) -> Result<Vec<ArgSpec>, LaunchError> {
    if let Some(problem) = &mut problem {
        lay_out(raw, problem)?;
    }
    let mut args = Vec::with_capacity(raw.len());
    for (index, one) in raw.iter().enumerate() {
        let arg = arg_of(index, raw, problem.as_deref())?;
        let judged = matches!(arg, ArgSpec::Tensor(_) | ArgSpec::Lse);
        if judged && args.contains(&arg) {
            return Err(LaunchError::Repeated { index, role: one.role.clone() });
        }
        args.push(arg);
    }
    if let Some(problem) = problem {
        problem.pass = Pass::Forward { lse: args.contains(&ArgSpec::Lse) };
    }
    Ok(args)
}

/// Sets the layout of each tensor. All arguments of a tensor must name the same layout.
fn lay_out(raw: &[RawArg], problem: &mut Problem) -> Result<(), LaunchError> {
    for tensor in Tensor::ALL {
        let mut chosen: Option<(usize, Layout)> = None;
        for (index, arg) in raw.iter().enumerate().filter(|(_, arg)| arg.tensor() == Some(tensor)) {
            let Some(name) = &arg.layout else { continue };
            let layout: Layout = name.parse()?;
            if let Some((first, other)) = chosen.filter(|(_, other)| *other != layout) {
                let accepted = format!("{}, as [[arg]] {first} has it", other.name());
                return Err(LaunchError::value(format!("[[arg]] {index} layout"), layout.name(), accepted));
            }
            chosen = chosen.or(Some((index, layout)));
        }
        let Some((_, layout)) = chosen else { continue };
        let [_, heads, seq, dim] = problem.extents(tensor);
        let strides = match tensor {
            Tensor::Q => &mut problem.q,
            Tensor::K => &mut problem.k,
            Tensor::V => &mut problem.v,
            Tensor::Out => &mut problem.out,
        };
        *strides = layout.strides(heads, seq, dim);
    }
    Ok(())
}

fn arg_of(index: usize, all: &[RawArg], problem: Option<&Problem>) -> Result<ArgSpec, LaunchError> {
    let raw = &all[index];
    let needs_problem = || {
        let (key, value) = (format!("[[arg]] {index} role"), format!("\"{}\"", raw.role));
        LaunchError::value(key, value, "this role only with a [problem] table")
    };
    if let Some(tensor) = tensor_of(&raw.role) {
        refuse_surplus(index, raw, &["layout"])?;
        return problem.map(|_| ArgSpec::Tensor(tensor)).ok_or_else(needs_problem);
    }
    match raw.role.as_str() {
        "lse" => {
            refuse_surplus(index, raw, &[])?;
            problem.ok_or_else(needs_problem).map(|_| ArgSpec::Lse)
        }
        "buffer" => {
            refuse_surplus(index, raw, &["dtype", "elements", "init"])?;
            memory_of(index, raw).map(ArgSpec::Buffer)
        }
        "tensor_map" => map_of(index, all, problem).map(ArgSpec::TensorMap),
        "u32" | "i32" | "u64" | "i64" | "f32" => scalar_of(index, raw).map(ArgSpec::Scalar),
        other => {
            let accepted = "q, k, v, out, lse, buffer, tensor_map, u32, i32, u64, i64, f32";
            Err(LaunchError::value(format!("[[arg]] {index} role"), format!("\"{other}\""), accepted))
        }
    }
}

pub(super) fn tensor_of(name: &str) -> Option<Tensor> {
    Tensor::ALL.into_iter().find(|tensor| tensor.name() == name)
}

impl RawArg {
    /// The tensor of the argument, or of its map.
    fn tensor(&self) -> Option<Tensor> {
        let of = self.of.as_ref().and_then(toml::Value::as_str);
        tensor_of(if self.role == "tensor_map" { of? } else { &self.role })
    }
}

pub(super) fn memory_of(index: usize, raw: &RawArg) -> Result<Memory, LaunchError> {
    let missing = |key| LaunchError::Missing { index, role: raw.role.clone(), key };
    let name = |key: &str, value: &str| (format!("[[arg]] {index} {key}"), format!("\"{value}\""));
    let dtype = raw.dtype.as_deref().ok_or_else(|| missing("dtype"))?;
    let dtype = dtype.parse().map_err(|()| {
        let (key, value) = name("dtype", dtype);
        LaunchError::value(key, value, BufferType::ACCEPTED.trim_end())
    })?;
    let elements = raw.elements.ok_or_else(|| missing("elements"))?;
    let elements = usize::try_from(elements)
        .ok()
        .filter(|&n| n > 0)
        .ok_or_else(|| LaunchError::value(format!("[[arg]] {index} elements"), elements, "1 or more"))?;
    let init = raw.init.as_deref().unwrap_or("uninitialised");
    let init = init.parse().map_err(|()| {
        let (key, value) = name("init", init);
        LaunchError::value(key, value, Init::ACCEPTED.trim_end())
    })?;
    Ok(Memory { dtype, elements, init })
}

fn scalar_of(index: usize, raw: &RawArg) -> Result<Arg, LaunchError> {
    refuse_surplus(index, raw, &["value"])?;
    let value = raw.value.as_ref();
    let value = value.ok_or_else(|| LaunchError::Missing { index, role: raw.role.clone(), key: "value" })?;
    let refuse = |accepted: &str| LaunchError::value(format!("[[arg]] {index} value"), value, accepted);
    let integer = value.as_integer();
    match raw.role.as_str() {
        "u32" => {
            integer.and_then(|v| u32::try_from(v).ok()).map(Arg::U32).ok_or_else(|| refuse("0 to 2^32 - 1"))
        }
        "i32" => integer
            .and_then(|v| i32::try_from(v).ok())
            .map(Arg::I32)
            .ok_or_else(|| refuse("-2^31 to 2^31 - 1")),
        "u64" => {
            integer.and_then(|v| u64::try_from(v).ok()).map(Arg::U64).ok_or_else(|| refuse("0 to 2^63 - 1"))
        }
        "i64" => integer.map(Arg::I64).ok_or_else(|| refuse("-2^63 to 2^63 - 1")),
        _ => value
            .as_float()
            .or(integer.map(|v| v as f64))
            .map(|v| Arg::F32(v as f32))
            .ok_or_else(|| refuse("a number, inf or nan")),
    }
}

pub(super) fn refuse_surplus(index: usize, raw: &RawArg, taken: &[&str]) -> Result<(), LaunchError> {
    let given = [
        ("layout", raw.layout.is_some()),
        ("dtype", raw.dtype.is_some()),
        ("elements", raw.elements.is_some()),
        ("init", raw.init.is_some()),
        ("value", raw.value.is_some()),
        ("of", raw.of.is_some()),
        ("dims", raw.dims.is_some()),
        ("strides", raw.strides.is_some()),
        ("offset", raw.offset.is_some()),
        ("box", raw.box_extents.is_some()),
        ("swizzle", raw.swizzle.is_some()),
        ("fill", raw.fill.is_some()),
    ];
    match given.into_iter().find(|(key, given)| *given && !taken.contains(key)) {
        Some((key, _)) => Err(LaunchError::Surplus { index, role: raw.role.clone(), key }),
        None => Ok(()),
    }
}
