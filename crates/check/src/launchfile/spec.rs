//! The validated launch file.

use std::str::FromStr;
use std::sync::Arc;

use problem::{Band, DTypes, Layout, Pass, Problem, Strides, Tensor};
use ptx::Dim3;

use super::LaunchError;
use super::constant::{Constant, constants_of};
use super::fill::type_of;
use super::map::{MapSpec, MapTarget, map_of};
use super::memory::{BufferType, FileInit, Init, Memory, init_of, memory_of};
use super::raw::{RawArg, RawFile, RawLaunch, RawProblem};
use super::scalar::{PointerSpec, Scalar, ScalarType, StructSpec, scalar_of, struct_of};
use crate::reference::ReferenceSpec;

/// A validated launch file, not bound to a module yet.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchSpec {
    /// The attention problem, if the file states one. Its strides follow the arguments' layouts, and it asks
    /// for the LSE if an argument has that role.
    pub problem: Option<Problem>,
    /// The launches, in order; at least one.
    pub launches: Vec<LaunchStep>,
    /// All arguments. A launch lists those that it passes.
    pub args: Vec<ArgSpec>,
    /// The names of the arguments that have one.
    pub names: Vec<Option<String>>,
    /// References that judge the outputs, in addition to the problem's oracle.
    pub references: Vec<ReferenceSpec>,
    /// Addresses in the contents of buffers.
    pub(super) addresses: Vec<AddressSpec>,
    pub(super) constants: Vec<Constant>,
    /// The files that `init` names, and their contents once they are read.
    pub(super) files: Vec<FileInit>,
    pub(super) data: Vec<Arc<[u8]>>,
    /// Contents of `out` and of `lse` before the launch.
    pub(super) out_init: Init,
    pub(super) lse_init: Init,
    /// The order of the rows of `lse`.
    pub(super) lse_layout: Layout,
    pub(super) finite_inputs: bool,
}

/// One launch of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct LaunchStep {
    /// The kernel's name, if the file gives one.
    pub entry: Option<String>,
    /// CTAs of the grid.
    pub grid: Dim3,
    /// CTAs per cluster; `None` leaves it to the entry's `.reqnctapercluster`.
    pub cluster: Option<Dim3>,
    /// Threads per CTA; `None` leaves it to the entry's `.reqntid`.
    pub block: Option<Dim3>,
    /// Dynamic shared memory in bytes.
    pub dynamic_shared: u32,
    /// Whether the launch is cooperative.
    pub cooperative: bool,
    /// Names and values of a Triton kernel's constants, as Python writes them.
    pub constexpr: Vec<(String, String)>,
    /// Numbers of the arguments, one per parameter, in order.
    pub args: Vec<usize>,
    /// Whether the file lists them.
    pub listed: bool,
}

/// An argument of a kernel, or memory to which other arguments refer.
#[derive(Clone, Debug, PartialEq)]
pub enum ArgSpec {
    Tensor(Tensor),
    /// The log-sum-exp output, f32.
    Lse,
    /// Memory outside the problem's tensors.
    Buffer(Memory),
    /// An array in global memory with the addresses of other arguments' memory; `None` is a null pointer.
    Pointers(Vec<Option<usize>>),
    /// An address inside the memory of another argument.
    Pointer(PointerSpec),
    TensorMap(MapSpec),
    Scalar(Scalar),
    Struct(StructSpec),
}

impl ArgSpec {
    /// The `role` as written in the file.
    pub fn role(&self) -> &'static str {
        match self {
            ArgSpec::Tensor(tensor) => tensor.name(),
            ArgSpec::Lse => "lse",
            ArgSpec::Buffer(_) => "buffer",
            ArgSpec::Pointers(_) => "pointers",
            ArgSpec::Pointer(_) => "pointer",
            ArgSpec::TensorMap(_) => "tensor_map",
            ArgSpec::Scalar(scalar) => scalar.ty.name(),
            ArgSpec::Struct(_) => "struct",
        }
    }
}

/// Eight bytes in the contents of a buffer that hold an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AddressSpec {
    /// The number of the file with the contents, and the byte there.
    pub file: usize,
    pub at: usize,
    pub pointer: PointerSpec,
}

/// Maximum memory of one launch in bytes, which a laptop can spare.
const MEMORY_LIMIT: usize = 4 << 30;

fn shortened(message: &str) -> String {
    message.lines().map(ptx::quote::cut).collect::<Vec<_>>().join("\n")
}

impl FromStr for LaunchSpec {
    type Err = LaunchError;

    fn from_str(text: &str) -> Result<LaunchSpec, LaunchError> {
        let file: RawFile =
            toml::from_str(text).map_err(|e| LaunchError::Syntax(shortened(&e.to_string())))?;
        LaunchSpec::of(&file)
    }
}

impl LaunchSpec {
    /// Validates a file.
    pub(super) fn of(file: &RawFile) -> Result<LaunchSpec, LaunchError> {
        let mut problem = file.problem.as_ref().map(problem_of).transpose()?;
        let mut files = Vec::new();
        check_names(&file.arg, file.problem.is_some())?;
        let args = args_of(&file.arg, problem.as_mut(), &mut files)?;
        if let Some(problem) = &problem {
            problem.check()?;
            check_work(problem)?;
        }
        let finite_inputs = match file.problem.as_ref().and_then(|problem| problem.inputs.as_deref()) {
            None | Some("all") => false,
            Some("finite") => true,
            Some(other) => return Err(LaunchError::value("problem.inputs", other, "all or finite")),
        };
        let out_init = start_of(&file.arg, "out", problem.as_ref(), &mut files)?;
        let lse_init = start_of(&file.arg, "lse", problem.as_ref(), &mut files)?;
        let lse_layout =
            match file.arg.iter().enumerate().find(|(_, arg)| arg.role == "lse" && arg.layout.is_some()) {
                Some((index, arg)) => layout_of(index, arg.layout.as_deref().unwrap_or_default())?,
                None => Layout::Bhsd,
            };
        let many = file.launch.len() > 1;
        let launches = file.launch.iter().enumerate().map(|(at, raw)| {
            let key = if many { format!("launch[{at}]") } else { "launch".to_owned() };
            step_of(&key, raw, &file.arg)
        });
        let launches = launches.collect::<Result<Vec<_>, _>>()?;
        if launches.is_empty() {
            return Err(LaunchError::value("launch", "[]", "at least one launch"));
        }
        let constants = constants_of(&file.constant, &mut files)?;
        let addresses = addresses_of(&file.arg, &args)?;
        let mut spec = LaunchSpec {
            problem,
            launches,
            args,
            names: file.arg.iter().map(|arg| arg.name.clone()).collect(),
            references: Vec::new(),
            addresses,
            constants,
            files,
            data: Vec::new(),
            out_init,
            lse_init,
            lse_layout,
            finite_inputs,
        };
        let mut files = std::mem::take(&mut spec.files);
        spec.references = ReferenceSpec::all(&file.reference, &spec, &file.arg, &mut files)?;
        spec.files = files;
        spec.check_judged()?;
        spec.check_memory()?;
        spec.check_maps()?;
        Ok(spec)
    }

    /// The name of an argument, for messages: the file's, else its number.
    pub fn name_of(&self, index: usize) -> String {
        self.names.get(index).cloned().flatten().unwrap_or_else(|| match self.args.get(index) {
            Some(arg @ (ArgSpec::Tensor(_) | ArgSpec::Lse)) => arg.role().to_owned(),
            _ => format!("arg{index}"),
        })
    }
}

impl LaunchSpec {
    /// Checks that a file with a problem has an output argument.
    fn check_judged(&self) -> Result<(), LaunchError> {
        let shows_out = |arg: &ArgSpec| match arg {
            ArgSpec::Tensor(tensor) => *tensor == Tensor::Out,
            ArgSpec::TensorMap(map) => map.target == MapTarget::Tensor(Tensor::Out),
            _ => false,
        };
        match self.problem {
            Some(_) if !self.args.iter().any(shows_out) => Err(LaunchError::Unjudged),
            _ => Ok(()),
        }
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
        problem.span(tensor)?.0.checked_mul(problem.dtypes.of(tensor).bytes())
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
                // If the tensor has its own argument, its memory is counted there.
                let given = self.args.contains(&ArgSpec::Tensor(*tensor));
                if given { Some(0) } else { self.tensor_bytes(*tensor) }
            }
            ArgSpec::Pointers(to) => to.len().checked_mul(8),
            ArgSpec::TensorMap(_) | ArgSpec::Pointer(_) | ArgSpec::Scalar(_) | ArgSpec::Struct(_) => Some(0),
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

/// The launch of one `[launch]` table.
pub(crate) fn step_of(key: &str, raw: &RawLaunch, all: &[RawArg]) -> Result<LaunchStep, LaunchError> {
    let name = |part: &str| format!("{key}.{part}");
    let grid = extents(&name("grid"), &raw.grid, [i64::from(i32::MAX), 65_535, 65_535])?;
    let cluster = raw.cluster.as_deref().map(|c| extents(&name("cluster"), c, [16, 16, 16])).transpose()?;
    if let Some(cluster) = cluster {
        check_cluster(&name("cluster"), cluster, grid)?;
    }
    let block = raw.block.as_deref().map(|b| extents(&name("block"), b, [1024, 1024, 64])).transpose()?;
    if let Some(block) = block.filter(|b| b.count() > 1024) {
        return Err(LaunchError::value(name("block"), block, "1 to 1024 threads in all"));
    }
    let args = match &raw.args {
        None => (0..all.len()).filter(|&index| all[index].parameter.unwrap_or(true)).collect(),
        Some(list) => list
            .iter()
            .map(|value| {
                number_of(value, all).ok_or_else(|| LaunchError::value(name("args"), value, ARGUMENT))
            })
            .collect::<Result<Vec<_>, _>>()?,
    };
    Ok(LaunchStep {
        entry: raw.entry.clone(),
        grid,
        cluster,
        block,
        dynamic_shared: shared_bytes(name("dynamic_shared"), raw.dynamic_shared.unwrap_or(0))?,
        cooperative: raw.cooperative.unwrap_or(false),
        constexpr: constexpr_of(&name("constexpr"), raw.constexpr.iter().flatten())?,
        args,
        listed: raw.args.is_some(),
    })
}

/// The constants of a Triton kernel. A text is an expression of Python, such as `tl.float16`.
fn constexpr_of<'v>(
    key: &str,
    given: impl Iterator<Item = (&'v String, &'v toml::Value)>,
) -> Result<Vec<(String, String)>, LaunchError> {
    let python = |value: &toml::Value| match value {
        toml::Value::Boolean(true) => Some("True".to_owned()),
        toml::Value::Boolean(false) => Some("False".to_owned()),
        toml::Value::Integer(_) | toml::Value::Float(_) => Some(value.to_string()),
        toml::Value::String(text) => Some(text.clone()),
        _ => None,
    };
    given
        .map(|(name, value)| {
            let refuse = || {
                LaunchError::value(
                    format!("{key}.{name}"),
                    value,
                    "a number, true, false, or an expression of Python as a string, such as \"tl.float16\"",
                )
            };
            Ok((name.clone(), python(value).ok_or_else(refuse)?))
        })
        .collect()
}

pub(super) fn check_cluster(key: &str, cluster: Dim3, grid: Dim3) -> Result<(), LaunchError> {
    let (g, c) = (grid, cluster);
    if c.count() <= 16 && g.0.is_multiple_of(c.0) && g.1.is_multiple_of(c.1) && g.2.is_multiple_of(c.2) {
        return Ok(());
    }
    Err(LaunchError::value(key, c, format!("at most 16 CTAs that divide grid = {g}")))
}

/// The accepted forms of a reference to an argument.
pub(crate) const ARGUMENT: &str = "the name or the number of an [[arg]], from 0 on";

/// The number of the argument that a value names: by its number, its name, or the role of a tensor.
pub(crate) fn number_of(value: &toml::Value, all: &[RawArg]) -> Option<usize> {
    if let Some(number) = value.as_integer() {
        return usize::try_from(number).ok().filter(|&number| number < all.len());
    }
    let name = value.as_str()?;
    let named = all.iter().position(|arg| arg.name.as_deref() == Some(name));
    named.or_else(|| {
        all.iter().position(|arg| arg.role == name && (tensor_of(name).is_some() || name == "lse"))
    })
}

/// The argument that a value names, if it has memory, and whether it is a tensor map by value.
fn memory_named(value: &toml::Value, all: &[RawArg]) -> Option<(usize, bool)> {
    let index = number_of(value, all)?;
    let role = all[index].role.as_str();
    let has = tensor_of(role).is_some() || matches!(role, "lse" | "buffer" | "pointers" | "tensor_map");
    let by_value = role == "tensor_map" && all[index].memory.as_deref() != Some("global");
    has.then_some((index, by_value))
}

fn check_names(all: &[RawArg], has_problem: bool) -> Result<(), LaunchError> {
    for (index, arg) in all.iter().enumerate() {
        let Some(name) = &arg.name else { continue };
        let key = format!("[[arg]] {index} name");
        let is_word = name.chars().all(|c| c.is_alphanumeric() || c == '_') && !name.is_empty();
        if !is_word || name.starts_with(|c: char| c.is_ascii_digit()) || name == "null" {
            let accepted = "letters, digits and _, not a digit first, and not null";
            return Err(LaunchError::value(key, format!("\"{name}\""), accepted));
        }
        let other = all[..index].iter().position(|other| other.name.as_ref() == Some(name));
        if let Some(first) = other {
            return Err(LaunchError::value(
                key,
                format!("\"{name}\""),
                format!("another name; [[arg]] {first} has it"),
            ));
        }
        if has_problem && (tensor_of(name).is_some() || name == "lse") && arg.role != *name {
            return Err(LaunchError::value(
                key,
                format!("\"{name}\""),
                "another name, since it is one of the problem's tensors",
            ));
        }
    }
    Ok(())
}

/// The contents of an output before the launch.
fn start_of(
    all: &[RawArg],
    role: &str,
    problem: Option<&Problem>,
    files: &mut Vec<FileInit>,
) -> Result<Init, LaunchError> {
    let found = all.iter().enumerate().find(|(_, arg)| arg.role == role);
    let (Some((index, arg)), Some(problem)) = (found, problem) else { return Ok(Init::Uninitialised) };
    let dtype = if role == "lse" { BufferType::F32 } else { type_of(problem.dtypes.out) };
    init_of(&format!("[[arg]] {index} init"), arg.init.as_ref(), dtype, files)
}

fn extents(key: &str, values: &[i64], most: [i64; 3]) -> Result<Dim3, LaunchError> {
    let written = || format!("[{}]", values.iter().map(i64::to_string).collect::<Vec<_>>().join(", "));
    let accepted = || match most {
        [x, y, z] if x == y && y == z => format!("one to three numbers from 1 to {x}"),
        [x, y, z] if y == z => {
            format!("one to three numbers, X[,Y[,Z]]: X from 1 to {x}, Y and Z from 1 to {y}")
        }
        [x, y, z] => {
            format!("one to three numbers, X[,Y[,Z]]: X and Y from 1 to {}, Z from 1 to {z}", x.min(y))
        }
    };
    let fits = !values.is_empty()
        && values.len() <= 3
        && values.iter().zip(most).all(|(&value, most)| value >= 1 && value <= most);
    if !fits {
        return Err(LaunchError::value(key, written(), accepted()));
    }
    let axis = |i: usize| values.get(i).map_or(1, |&v| v as u32);
    Ok(Dim3(axis(0), axis(1), axis(2)))
}

fn shared_bytes(key: String, value: i64) -> Result<u32, LaunchError> {
    // 227 KiB is the maximum per CTA on any architecture (sm_90).
    u32::try_from(value)
        .ok()
        .filter(|&b| b <= 227 * 1024)
        .ok_or_else(|| LaunchError::value(key, value, "0 to 232448 bytes"))
}

fn problem_of(raw: &RawProblem) -> Result<Problem, LaunchError> {
    let size = |key: &str, value: i64, least: i64| {
        usize::try_from(value)
            .ok()
            .filter(|_| value >= least)
            .ok_or_else(|| LaunchError::value(format!("problem.{key}"), value, format!("{least} or more")))
    };
    let dtypes: DTypes = raw.dtype.parse()?;
    let heads_q = size("heads_q", raw.heads_q, 1)?;
    let seq_q = size("seq_q", raw.seq_q, 1)?;
    let batch = size("batch", raw.batch.unwrap_or(1), 1)?;
    let head_dim = size("head_dim", raw.head_dim, 1)?;
    let mut problem = Problem::new(batch, heads_q, seq_q, head_dim, dtypes);
    problem.head_dim_v = raw.head_dim_v.map_or(Ok(head_dim), |d| size("head_dim_v", d, 1))?;
    problem.heads_kv = raw.heads_kv.map_or(Ok(heads_q), |h| size("heads_kv", h, 1))?;
    problem.seq_kv = raw.seq_kv.map_or(Ok(seq_q), |s| size("seq_kv", s, 0))?;
    problem.band = raw.mask.as_deref().map_or(Ok(Band::FULL), str::parse)?;
    problem.score.scale = raw.scale.map(|s| s as f32);
    problem.score.softcap = raw.softcap.map(|s| s as f32);
    problem.scales = raw.scales.unwrap_or_default();
    Ok(problem.with_layout(Layout::Bhsd))
}

fn args_of(
    raw: &[RawArg],
    mut problem: Option<&mut Problem>,
    files: &mut Vec<FileInit>,
) -> Result<Vec<ArgSpec>, LaunchError> {
    if let Some(problem) = &mut problem {
        lay_out(raw, problem)?;
    }
    let mut args = Vec::with_capacity(raw.len());
    for (index, one) in raw.iter().enumerate() {
        let arg = arg_of(index, raw, problem.as_deref(), files)?;
        let judged = matches!(arg, ArgSpec::Tensor(_) | ArgSpec::Lse);
        if judged && args.contains(&arg) {
            return Err(LaunchError::Repeated { index, role: one.role.clone() });
        }
        args.push(arg);
    }
    if let Some(problem) = problem {
        problem.pass = Pass::forward(args.contains(&ArgSpec::Lse));
    }
    Ok(args)
}

/// Sets the layout of each tensor. All arguments of a tensor must name the same layout.
fn lay_out(raw: &[RawArg], problem: &mut Problem) -> Result<(), LaunchError> {
    for tensor in Tensor::FORWARD {
        let mut chosen: Option<(usize, Layout)> = None;
        for (index, arg) in raw.iter().enumerate().filter(|(_, arg)| arg.tensor() == Some(tensor)) {
            let Some(name) = &arg.layout else { continue };
            let layout = layout_of(index, name)?;
            if let Some((first, other)) = chosen.filter(|(_, other)| *other != layout) {
                let accepted = format!("{}, as [[arg]] {first} has it", other.name());
                return Err(LaunchError::value(format!("[[arg]] {index} layout"), layout.name(), accepted));
            }
            chosen = chosen.or(Some((index, layout)));
        }
        let stated =
            raw.iter().enumerate().find(|(_, arg)| arg.role == tensor.name() && arg.strides.is_some());
        let [_, heads, seq, dim] = problem.extents(tensor);
        let laid = match (chosen, stated) {
            (_, Some((index, arg))) => strides_of(index, arg)?,
            (Some((_, layout)), None) => layout.strides(heads, seq, dim),
            (None, None) => continue,
        };
        problem.set_strides(tensor, laid);
    }
    Ok(())
}

fn layout_of(index: usize, name: &str) -> Result<Layout, LaunchError> {
    name.parse().map_err(|_| LaunchError::value(format!("[[arg]] {index} layout"), name, "bhsd or bshd"))
}

/// `strides` of a tensor: elements between batches, heads and rows.
fn strides_of(index: usize, arg: &RawArg) -> Result<Strides, LaunchError> {
    let given = arg.strides.as_deref().unwrap_or_default();
    if arg.layout.is_some() {
        let key = format!("[[arg]] {index} strides");
        return Err(LaunchError::value(key, format!("{given:?}"), "only one of `strides` and `layout`"));
    }
    match *given {
        [batch, head, row] => Ok(Strides { batch, head, row }),
        _ => {
            let accepted = "[batch, head, row]: elements from one to the next";
            Err(LaunchError::value(format!("[[arg]] {index} strides"), format!("{given:?}"), accepted))
        }
    }
}

fn arg_of(
    index: usize,
    all: &[RawArg],
    problem: Option<&Problem>,
    files: &mut Vec<FileInit>,
) -> Result<ArgSpec, LaunchError> {
    let raw = &all[index];
    let needs_problem = || {
        let (key, value) = (format!("[[arg]] {index} role"), format!("\"{}\"", raw.role));
        LaunchError::value(key, value, "this role only with a [problem] table")
    };
    if let Some(tensor) = tensor_of(&raw.role) {
        let keys: &[&str] =
            if tensor == Tensor::Out { &["layout", "strides", "init"] } else { &["layout", "strides"] };
        refuse_surplus(index, raw, keys)?;
        return problem.map(|_| ArgSpec::Tensor(tensor)).ok_or_else(needs_problem);
    }
    if let Ok(ty) = raw.role.parse::<ScalarType>() {
        return scalar_of(index, ty, raw).map(ArgSpec::Scalar);
    }
    match raw.role.as_str() {
        "lse" => {
            refuse_surplus(index, raw, &["layout", "init"])?;
            problem.ok_or_else(needs_problem).map(|_| ArgSpec::Lse)
        }
        "buffer" => {
            refuse_surplus(index, raw, &["dtype", "elements", "shape", "strides", "init", "addresses"])?;
            memory_of(index, raw, files).map(ArgSpec::Buffer)
        }
        "pointers" => pointers_of(index, all).map(ArgSpec::Pointers),
        "pointer" => {
            refuse_surplus(index, raw, &["of", "plus"])?;
            let of = raw.of.as_ref();
            let of = of.ok_or_else(|| LaunchError::Missing { index, role: raw.role.clone(), key: "of" })?;
            let key = |key: &str| format!("[[arg]] {index} {key}");
            PointerSpec::of(&key, of, raw.plus, &|value| memory_named(value, all)).map(ArgSpec::Pointer)
        }
        "struct" => {
            struct_of(index, raw, &|value: &toml::Value| memory_named(value, all)).map(ArgSpec::Struct)
        }
        "tensor_map" => map_of(index, all, problem, files).map(ArgSpec::TensorMap),
        other => {
            let accepted = format!(
                "q, k, v, out, lse, buffer, pointer, pointers, tensor_map, struct, {}",
                ScalarType::ACCEPTED.trim_end().replace(' ', ", ")
            );
            Err(LaunchError::value(format!("[[arg]] {index} role"), format!("\"{other}\""), accepted))
        }
    }
}

/// The arguments whose addresses an array of pointers holds.
fn pointers_of(index: usize, all: &[RawArg]) -> Result<Vec<Option<usize>>, LaunchError> {
    let raw = &all[index];
    refuse_surplus(index, raw, &["of"])?;
    let of = raw.of.as_ref();
    let of = of.ok_or_else(|| LaunchError::Missing { index, role: raw.role.clone(), key: "of" })?;
    let refuse = || {
        let accepted = "an array of at least one name or number of an [[arg]] that has memory, or \"null\"";
        LaunchError::value(format!("[[arg]] {index} of"), of, accepted)
    };
    let list = of.as_array().filter(|list| !list.is_empty()).ok_or_else(refuse)?;
    let target = |value: &toml::Value| match value.as_str() {
        Some("null") => Ok(None),
        _ => {
            memory_named(value, all).filter(|(_, is_map)| !is_map).map(|(at, _)| Some(at)).ok_or_else(refuse)
        }
    };
    list.iter().map(target).collect()
}

/// The addresses in the contents of all buffers.
fn addresses_of(all: &[RawArg], args: &[ArgSpec]) -> Result<Vec<AddressSpec>, LaunchError> {
    let mut found = Vec::new();
    for (index, (raw, arg)) in all.iter().zip(args).enumerate() {
        for (number, raw) in raw.addresses.iter().flatten().enumerate() {
            let key = |key: &str| format!("[[arg]] {index} addresses[{number}] {key}");
            let ArgSpec::Buffer(Memory { init: Init::File(file), view: None, dtype, elements }) = arg else {
                let accepted = "a buffer with elements and init = { file = … }";
                return Err(LaunchError::value(key("at"), raw.at, accepted));
            };
            let at = usize::try_from(raw.at).ok().filter(|at| {
                at.checked_add(8).is_some_and(|end| end <= elements.saturating_mul(dtype.bytes()))
            });
            let at = at.ok_or_else(|| LaunchError::value(key("at"), raw.at, "8 bytes within the buffer"))?;
            let pointer = PointerSpec::of(&key, &raw.of, raw.plus, &|value| memory_named(value, all))?;
            found.push(AddressSpec { file: *file, at, pointer });
        }
    }
    Ok(found)
}

pub(super) fn tensor_of(name: &str) -> Option<Tensor> {
    Tensor::FORWARD.into_iter().find(|tensor| tensor.name() == name)
}

impl RawArg {
    /// The tensor of the argument, or of its map.
    fn tensor(&self) -> Option<Tensor> {
        let of = self.of.as_ref().and_then(toml::Value::as_str);
        tensor_of(if self.role == "tensor_map" { of? } else { &self.role })
    }
}

pub(super) fn refuse_surplus(index: usize, raw: &RawArg, taken: &[&str]) -> Result<(), LaunchError> {
    let given = [
        ("layout", raw.layout.is_some()),
        ("dtype", raw.dtype.is_some()),
        ("elements", raw.elements.is_some()),
        ("shape", raw.shape.is_some()),
        ("init", raw.init.is_some()),
        ("value", raw.value.is_some()),
        ("of", raw.of.is_some()),
        ("dims", raw.dims.is_some()),
        ("strides", raw.strides.is_some()),
        ("offset", raw.offset.is_some()),
        ("plus", raw.plus.is_some()),
        ("addresses", raw.addresses.is_some()),
        ("box", raw.box_extents.is_some()),
        ("swizzle", raw.swizzle.is_some()),
        ("fill", raw.fill.is_some()),
        ("memory", raw.memory.is_some()),
        ("fields", raw.fields.is_some()),
        ("bytes", raw.bytes.is_some()),
    ];
    match given.into_iter().find(|(key, given)| *given && !taken.contains(key)) {
        Some((key, _)) => Err(LaunchError::Surplus { index, role: raw.role.clone(), key }),
        None => Ok(()),
    }
}
