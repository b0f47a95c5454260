//! Binds a launch file to the module whose kernels it launches.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use emu::argument_bytes;
use kernels::{BufferKind, Program};
use problem::{Layout, Operand, PassKind, Problem, Tensor};
use ptx::{Access, Arg, BufferSpec, Function, Kernel, Launch, Module, Param, TensorMapSpec, Verified};

use super::memory::{BufferType, Init, Memory};
use super::scalar::Scalar;
use super::spec::check_cluster;
use super::{ArgSpec, LaunchError, LaunchSpec, LaunchStep, MapTarget, fill};
use crate::names::demangle;
use crate::reference::{self, Reference, ReferenceSource, ReferenceSpec};

/// The role of a kernel's buffer: what the gate writes to it before the launch, and whether its contents are
/// judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An operand of the problem. Inputs are drawn, `out` and the LSE are judged.
    Operand(Operand),
    /// The codes of an input that the gate quantises ([`crate::gate::quantised`]).
    Codes(Tensor),
    /// The scales of these codes, f32: one for each head of Q, then of K, then of V.
    Scales,
    /// Another buffer of a generated kernel: codes, counters, scratch memory and temporaries.
    Internal(BufferKind),
    /// Memory with given initial contents. Its final contents are judged only by a reference.
    Fill(Memory),
    /// Addresses of other buffers or a tensor map: the number of the list in [`Bound::words`].
    Words(usize),
}

impl From<BufferKind> for Role {
    fn from(kind: BufferKind) -> Role {
        kind.operand().map_or(Role::Internal(kind), Role::Operand)
    }
}

/// The kernels of a program with the roles of their buffers, which the gate can check.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    /// The kernel that is launched first.
    pub kernel: Kernel,
    /// The kernels that are launched after it, in order. They are entries of the same module and take the
    /// same buffers.
    pub then: Vec<Kernel>,
    /// The role of each buffer in `kernel.buffers`.
    pub roles: Vec<Role>,
    /// The problem to which the buffers belong; `None` if the oracle judges no output.
    pub problem: Option<Problem>,
    /// Whether each launch is cooperative (all its CTAs are resident together), in launch order. Launches
    /// beyond the end of the list are not.
    pub cooperative: Vec<bool>,
    /// Outputs of the problem that have contents before the launch: the number of the buffer, and the
    /// contents.
    pub starts: Vec<(usize, Memory)>,
    /// The lists of addresses and tensor maps that buffers hold.
    pub words: Vec<Vec<Arg>>,
    /// The contents of files.
    pub data: Vec<Arc<[u8]>>,
    /// The order of the rows of the LSE.
    pub lse_layout: Layout,
    /// Whether no run has inputs with NaN, infinities or logits of −∞.
    pub finite_inputs: bool,
    /// References that judge outputs, in addition to the problem's oracle.
    pub references: Vec<Reference>,
}

impl Bound {
    /// A generated program. The module has the line numbers of its printed form, so that findings name lines.
    pub fn of_program(program: Program, problem: &Problem) -> Bound {
        let roles = program.contracts.buffers.iter().map(|buffer| buffer.kind.into()).collect();
        let mut then = program.kernels();
        let kernel = then.remove(0);
        Bound { then, ..Bound::of_kernel(kernel, roles, Some(problem.clone())) }
    }

    /// One kernel whose buffers have these roles.
    pub fn of_kernel(kernel: Kernel, roles: Vec<Role>, problem: Option<Problem>) -> Bound {
        Bound {
            kernel,
            then: Vec::new(),
            roles,
            problem,
            cooperative: Vec::new(),
            starts: Vec::new(),
            words: Vec::new(),
            data: Vec::new(),
            lse_layout: Layout::Bhsd,
            finite_inputs: false,
            references: Vec::new(),
        }
    }

    /// All kernels in launch order.
    pub fn steps(&self) -> impl Iterator<Item = &Kernel> {
        std::iter::once(&self.kernel).chain(&self.then)
    }

    /// Whether a buffer of this role is an output of the problem.
    pub fn is_output(&self, role: Role) -> bool {
        let pass = self.problem.as_ref().map_or(PassKind::Forward, |problem| problem.pass.kind());
        matches!(role, Role::Operand(operand) if operand.is_output(pass))
    }

    /// All kernels in launch order, mutable.
    pub fn steps_mut(&mut self) -> impl Iterator<Item = &mut Kernel> {
        std::iter::once(&mut self.kernel).chain(&mut self.then)
    }

    /// Whether a launch, by its number in launch order from 0, is cooperative.
    pub fn is_cooperative(&self, step: usize) -> bool {
        self.cooperative.get(step).copied().unwrap_or(false)
    }

    /// The contents of a buffer before the launch, if a launch file states them.
    pub fn memory(&self, buffer: usize) -> Option<Memory> {
        match self.roles.get(buffer) {
            Some(Role::Fill(memory)) => Some(*memory),
            _ => self.starts.iter().find(|(index, _)| *index == buffer).map(|(_, memory)| *memory),
        }
    }
}

impl LaunchSpec {
    /// Binds the launch file to a module.
    ///
    /// # Errors
    /// A [`LaunchError`] when the entry is missing or its parameters do not fit the arguments, or when the
    /// launch file names files.
    pub fn bind(&self, module: Verified) -> Result<Bound, LaunchError> {
        if let Some(file) = self.files.get(self.data.len()) {
            return Err(LaunchError::Unread { key: file.key.clone() });
        }
        let unread = |reference: &ReferenceSpec| match &reference.source {
            ReferenceSource::Kernel { .. } => Some("reference.kernel"),
            ReferenceSource::Python { .. } => Some("reference.python"),
            ReferenceSource::Builtin(_) | ReferenceSource::File { .. } => None,
        };
        match self.references.iter().find_map(unread) {
            Some(key) => Err(LaunchError::Unread { key: key.to_owned() }),
            None => self.bind_with(module, &[], Path::new(".")),
        }
    }

    /// Like [`LaunchSpec::bind`], with the modules of the reference kernels in the order of
    /// [`LaunchSpec::reference_kernels`]. Python files are found in `folder`.
    ///
    /// # Errors
    /// As for [`LaunchSpec::bind`].
    pub fn bind_with(
        &self,
        module: Verified,
        references: &[Verified],
        folder: &Path,
    ) -> Result<Bound, LaunchError> {
        let module = self.with_constants(module)?;
        let mut contract = Contract::default();
        // The memory of each argument is determined first, because a tensor map may refer to another
        // argument's memory.
        let homes: Vec<_> = (0..self.args.len()).map(|index| contract.home(self, index)).collect();
        let values = contract.values(self, &homes);
        if self.launches.len() > 1 {
            // Several launches may write an output together, or a later launch may read it.
            contract.share();
        }
        let kernel_of = |module: &Verified, step: &LaunchStep, key: &str| -> Result<Kernel, LaunchError> {
            let entry = step.pick_entry(module, key)?;
            self.check_params(step, entry)?;
            Ok(Kernel {
                module: module.clone(),
                entry: entry.name.to_string(),
                launch: step.launch_of(entry, key)?,
                buffers: contract.buffers.clone(),
                tensor_maps: contract.maps.clone(),
                args: step.args.iter().map(|&at| values[at].clone()).collect(),
            })
        };
        let mut kernels = Vec::new();
        for (at, step) in self.launches.iter().enumerate() {
            let key = if self.launches.len() > 1 { format!("launch[{at}]") } else { "launch".to_owned() };
            kernels.push(kernel_of(&module, step, &key)?);
        }
        let mut modules = references.iter();
        let mut bound_references = Vec::new();
        for spec in &self.references {
            let kernel = match &spec.source {
                ReferenceSource::Kernel { launch, .. } => {
                    let missing = || LaunchError::Unread { key: "reference.kernel".to_owned() };
                    let mut kernel = kernel_of(modules.next().ok_or_else(missing)?, launch, "reference")?;
                    kernel.buffers.iter_mut().for_each(|buffer| buffer.access = Access::ReadWrite);
                    Some(Arc::new(kernel))
                }
                _ => None,
            };
            bound_references.push(self.reference(spec, kernel, &homes, folder));
        }
        let kernel = kernels.remove(0);
        let mut data = self.data.clone();
        for address in &self.addresses {
            let argument = address.pointer.argument(|of| values.get(of).cloned());
            // The contents of a file with another size were refused when the file was read.
            if let Some(contents) = data.get_mut(address.file) {
                let contents = Arc::make_mut(contents);
                contents[address.at..address.at + 8].copy_from_slice(&argument_bytes(&argument));
            }
        }
        let Contract { roles, starts, words, .. } = contract;
        Ok(Bound {
            kernel,
            then: kernels,
            roles,
            problem: self.problem.clone(),
            cooperative: self.launches.iter().map(|step| step.cooperative).collect(),
            starts,
            words,
            data,
            lse_layout: self.lse_layout,
            finite_inputs: self.finite_inputs,
            references: bound_references,
        })
    }

    /// The files of the reference kernels.
    pub fn reference_kernels(&self) -> impl Iterator<Item = &str> {
        self.references.iter().filter_map(ReferenceSpec::kernel_file)
    }

    fn reference(
        &self,
        spec: &ReferenceSpec,
        kernel: Option<Arc<Kernel>>,
        homes: &[Option<usize>],
        folder: &Path,
    ) -> Reference {
        // Outputs and inputs were checked to have memory when the file was read.
        let memory = |at: usize| self.shape_of(at).unwrap_or(Memory::new(BufferType::U8, 0, Init::Zeros));
        let buffer = |at: usize| homes.get(at).copied().flatten().unwrap_or(0);
        let inputs = spec.inputs.iter().map(|&at| match &self.args[at] {
            ArgSpec::Scalar(scalar) => reference::ReferenceInput::Number(scalar.number()),
            _ => reference::ReferenceInput::Buffer { index: buffer(at), memory: memory(at) },
        });
        let elements = match &spec.source {
            ReferenceSource::File { file, .. } => self.data.get(*file).cloned(),
            _ => None,
        };
        Reference {
            name: self.name_of(spec.output),
            output: buffer(spec.output),
            memory: memory(spec.output),
            inputs: inputs.collect(),
            source: spec.source.clone(),
            tolerance: spec.tolerance,
            kernel,
            elements,
            folder: folder.to_path_buf(),
        }
    }

    /// The module with the contents of its `[[constant]]` variables.
    fn with_constants(&self, module: Verified) -> Result<Verified, LaunchError> {
        if self.constants.is_empty() {
            return Ok(module);
        }
        let mut module = module.into_module();
        for (seed, constant) in self.constants.iter().enumerate() {
            let bytes = |dtype: BufferType, elements: usize, init: Init| match init {
                Init::File(file) => self.data.get(file).map(|bytes| bytes.to_vec()).unwrap_or_default(),
                init => {
                    fill(&Memory::new(dtype, elements, init), seed as u64, &self.data).unwrap_or_default()
                }
            };
            constant.set(&mut module, bytes)?;
        }
        module.verify().map_err(LaunchError::Constant)
    }

    fn check_params(&self, step: &LaunchStep, entry: &Function) -> Result<(), LaunchError> {
        if entry.params.len() != step.args.len() {
            return Err(LaunchError::Count {
                entry: demangle(&entry.name).into_owned(),
                args: step.args.len(),
                listed: step.listed,
                params: entry.params.len(),
                list: ptx::quote::list(entry.params.iter().map(describe)),
            });
        }
        for (&index, param) in step.args.iter().zip(&entry.params) {
            let arg = &self.args[index];
            if !fits(arg, param) {
                return Err(LaunchError::Mismatch {
                    index,
                    role: arg.role().to_owned(),
                    given: match arg {
                        ArgSpec::Scalar(scalar) => format!("a number of {} bytes", scalar.value.bytes()),
                        ArgSpec::Struct(value) => format!("a struct of {} bytes", value.bytes()),
                        ArgSpec::TensorMap(map) if !map.in_memory => {
                            "a tensor map of 128 bytes at a multiple of 64".to_owned()
                        }
                        _ => "an address of 8 bytes".to_owned(),
                    },
                    parameter: demangle(&param.name).into_owned(),
                    wanted: describe(param),
                });
            }
        }
        Ok(())
    }
}

impl LaunchStep {
    /// A launch of one CTA of the entry with this name.
    pub(super) fn named(entry: Option<&str>) -> LaunchStep {
        LaunchStep {
            entry: entry.map(str::to_owned),
            grid: ptx::Dim3(1, 1, 1),
            cluster: None,
            block: None,
            dynamic_shared: 0,
            cooperative: false,
            constexpr: Vec::new(),
            args: Vec::new(),
            listed: false,
        }
    }

    pub(super) fn pick_entry<'m>(&self, module: &'m Module, key: &str) -> Result<&'m Function, LaunchError> {
        let accepted = || ptx::quote::list(names(module));
        let mut entries = module.entries();
        match (&self.entry, entries.next()) {
            (_, None) => Err(LaunchError::NoEntry),
            (None, Some(only)) => match entries.next() {
                None => Ok(only),
                Some(_) => Err(LaunchError::AmbiguousEntry { key: key.to_owned(), accepted: accepted() }),
            },
            (Some(name), _) => entry_named(module, name).ok_or_else(|| {
                let name = ptx::quote::cut(name).into_owned();
                LaunchError::UnknownEntry { key: key.to_owned(), name, accepted: accepted() }
            }),
        }
    }

    fn launch_of(&self, entry: &Function, key: &str) -> Result<Launch, LaunchError> {
        let required = entry.bounds.required_cluster.map(|[x, y, z]| ptx::Dim3(x.max(1), y.max(1), z.max(1)));
        let cluster = self.cluster.or(required).unwrap_or(ptx::Dim3(1, 1, 1));
        check_cluster(&format!("{key}.cluster"), cluster, self.grid)?;
        Ok(Launch {
            cluster,
            dynamic_shared: self.dynamic_shared,
            ..Launch::new(self.grid, self.block_for(entry, key)?)
        })
    }

    fn block_for(&self, entry: &Function, key: &str) -> Result<ptx::Dim3, LaunchError> {
        let name = format!("{key}.block");
        let required = entry.bounds.required_threads.map(|[x, y, z]| ptx::Dim3(x, y, z));
        let Some(block) = self.block else {
            return required.ok_or_else(|| {
                LaunchError::value(
                    &*name,
                    "(missing)",
                    "[x, y, z]; the entry has no .reqntid to take it from",
                )
            });
        };
        if let Some(required) = required.filter(|&r| r != block) {
            let accepted = format!("{required}, the entry's .reqntid");
            return Err(LaunchError::value(&*name, block, accepted));
        }
        if let Some([x, y, z]) = entry.bounds.max_threads {
            let most = ptx::Dim3(x, y, z);
            if block.count() > most.count() {
                let accepted = format!("at most {} threads, the entry's .maxntid", most.count());
                return Err(LaunchError::value(&*name, block, accepted));
            }
        }
        Ok(block)
    }
}

/// The entry with a name: as in the module, or as in the source (`scale` for `_Z5scalePf`) if only one entry
/// matches.
fn entry_named<'m>(module: &'m Module, name: &str) -> Option<&'m Function> {
    let exact = module.entries().find(|f| *f.name == *name);
    let exact = exact.or_else(|| {
        // The Itanium C++ ABI writes a name as its length and its letters.
        let mangled = format!("_Z{}{name}", name.len());
        let nested = format!("{}{name}", name.len());
        let matches = |f: &&Function| {
            f.name.starts_with(&mangled) || f.name.starts_with("_ZN") && f.name.contains(&nested)
        };
        let mut found = module.entries().filter(matches);
        found.next().filter(|_| found.next().is_none())
    });
    // A name as in messages, such as `sum<float, 4>`.
    exact.or_else(|| module.entries().find(|f| demangle(&f.name) == name))
}

/// The names of the entries as in the source, by which a launch file may name them; as in the module where
/// several entries have one name.
pub(super) fn names(module: &Module) -> Vec<Cow<'_, str>> {
    let readable = || module.entries().map(|entry| demangle(&entry.name));
    let mut counts: HashMap<Cow<'_, str>, usize> = HashMap::new();
    for name in readable() {
        *counts.entry(name).or_default() += 1;
    }
    module
        .entries()
        .zip(readable())
        .map(|(entry, name)| if counts[&name] == 1 { name } else { Cow::Borrowed(&*entry.name) })
        .collect()
}

/// A launch contract under construction.
#[derive(Default)]
struct Contract {
    buffers: Vec<BufferSpec>,
    roles: Vec<Role>,
    starts: Vec<(usize, Memory)>,
    maps: Vec<TensorMapSpec>,
    words: Vec<Vec<Arg>>,
}

impl Contract {
    /// The buffer of an argument, if it has one.
    fn home(&mut self, spec: &LaunchSpec, index: usize) -> Option<usize> {
        let arg = &spec.args[index];
        let tensor = |tensor: Tensor| {
            let access = if tensor == Tensor::Out { Access::Write } else { Access::Read };
            (
                Role::Operand(Operand::Tensor(tensor)),
                tensor.name().to_owned(),
                access,
                spec.tensor_bytes(tensor),
            )
        };
        let memory =
            |memory: &Memory| (Role::Fill(*memory), spec.name_of(index), Access::ReadWrite, memory.bytes());
        let (role, name, mut access, bytes) = match arg {
            ArgSpec::Tensor(of) => tensor(*of),
            ArgSpec::Lse => {
                (Role::Operand(Operand::Lse), "lse".to_owned(), Access::Write, spec.buffer_bytes(arg))
            }
            ArgSpec::Buffer(of) => memory(of),
            ArgSpec::TensorMap(map) => match &map.target {
                MapTarget::Tensor(of) => tensor(*of),
                MapTarget::Own(of) => memory(of),
                MapTarget::Argument(_) => return None,
            },
            ArgSpec::Pointers(to) => {
                self.words.push(Vec::new());
                let role = Role::Words(self.words.len() - 1);
                (role, spec.name_of(index), Access::Read, Some(8 * to.len()))
            }
            ArgSpec::Pointer(_) | ArgSpec::Scalar(_) | ArgSpec::Struct(_) => return None,
        };
        // A tensor has one buffer, however many arguments refer to it.
        let known = self.roles.iter().position(|r| *r == role && matches!(role, Role::Operand(_)));
        Some(known.unwrap_or_else(|| {
            let start = match role {
                Role::Operand(Operand::Tensor(Tensor::Out)) => spec.out_init,
                Role::Operand(Operand::Lse) => spec.lse_init,
                _ => Init::Uninitialised,
            };
            if start != Init::Uninitialised {
                access = Access::ReadWrite;
                let start = spec.shape_of(index).map(|memory| Memory { init: start, ..memory });
                self.starts.extend(start.map(|memory| (self.roles.len(), memory)));
            }
            // Sizes were checked when the file was read.
            self.add(role, name, access, bytes.unwrap_or(0))
        }))
    }

    fn add(&mut self, role: Role, name: String, access: Access, bytes: usize) -> usize {
        self.roles.push(role);
        self.buffers.push(BufferSpec { name, bytes, access });
        self.roles.len() - 1
    }

    /// The kernel's arguments, one for each argument of the launch file.
    fn values(&mut self, spec: &LaunchSpec, homes: &[Option<usize>]) -> Vec<Arg> {
        let address = |home: Option<usize>| home.map_or(Arg::Null, |index| Arg::Buffer { index, offset: 0 });
        let mut values = Vec::with_capacity(spec.args.len());
        for (index, (arg, home)) in spec.args.iter().zip(homes).enumerate() {
            values.push(match arg {
                ArgSpec::Scalar(scalar) => scalar.value.clone(),
                ArgSpec::TensorMap(map) => {
                    let buffer = match map.target {
                        MapTarget::Argument(of) => homes.get(of).copied().flatten(),
                        MapTarget::Tensor(_) | MapTarget::Own(_) => *home,
                    };
                    self.maps.push(map.in_buffer(buffer.unwrap_or(0)));
                    let value = Arg::TensorMap { index: self.maps.len() - 1 };
                    if map.in_memory {
                        self.words.push(vec![value]);
                        let role = Role::Words(self.words.len() - 1);
                        let name = format!("{} (tensor map)", spec.name_of(index));
                        let bytes = TensorMapSpec::BYTES as usize;
                        address(Some(self.add(role, name, Access::Read, bytes)))
                    } else {
                        value
                    }
                }
                ArgSpec::Pointers(to) => {
                    let list = to.iter().map(|&to| address(to.and_then(|to| homes[to]))).collect();
                    if let Some(Role::Words(words)) = home.and_then(|home| self.roles.get(home)) {
                        self.words[*words] = list;
                    }
                    address(*home)
                }
                ArgSpec::Tensor(_) | ArgSpec::Lse | ArgSpec::Buffer(_) => address(*home),
                // These are filled in after all other arguments, to which they may refer.
                ArgSpec::Pointer(_) | ArgSpec::Struct(_) => Arg::Null,
            });
        }
        for (index, arg) in spec.args.iter().enumerate() {
            let of = |of: usize| values.get(of).cloned();
            values[index] = match arg {
                ArgSpec::Struct(value) => value.argument(of),
                ArgSpec::Pointer(pointer) => pointer.argument(of),
                _ => continue,
            };
        }
        values
    }

    /// Lets every launch read and write the outputs.
    fn share(&mut self) {
        for buffer in self.buffers.iter_mut().filter(|buffer| buffer.access == Access::Write) {
            buffer.access = Access::ReadWrite;
        }
    }
}

fn describe(param: &Param) -> String {
    match param.elements {
        Some(n) => format!(".{} {}[{n}]", param.ty, demangle(&param.name)),
        None => format!(".{} {}", param.ty, demangle(&param.name)),
    }
}

/// The size must match, and a float argument needs a float parameter; `.bN` accepts both.
fn fits(arg: &ArgSpec, param: &Param) -> bool {
    let float = |is_float: bool| param.ty.is_bits() || param.ty.is_float() == is_float;
    match arg {
        ArgSpec::TensorMap(map) if !map.in_memory => {
            param.bytes() == TensorMapSpec::BYTES && param.align.is_multiple_of(TensorMapSpec::ALIGN)
        }
        ArgSpec::Scalar(Scalar { ty, value }) => param.bytes() == value.bytes() && float(ty.is_float()),
        ArgSpec::Struct(value) => param.bytes() == value.bytes() && param.ty.is_bits(),
        _ => param.bytes() == 8 && float(false),
    }
}
