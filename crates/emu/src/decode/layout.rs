//! The layout of a kernel's variables: their addresses in each memory space, and the limits on their sizes.

use std::collections::HashMap;

use ptx::{Function, Initializer, Module, Name, ParamSpace, Space, Variable};

use crate::EmuError;
use crate::memory::{CONST_BASE, GlobalMemory, SHARED_BASE};
use crate::report::Placement;

/// A module-scope `.global` variable.
#[derive(Clone, Debug)]
pub(crate) struct VariableRegion {
    pub name: String,
    pub contents: Vec<u8>,
}

/// A variable of shared memory, with the name that findings show.
#[derive(Clone, Debug)]
pub(crate) struct SharedVariable {
    pub name: String,
    /// Bytes from the start of shared memory.
    pub start: u32,
    pub bytes: u32,
    /// The alignment that the declaration promises.
    pub align: u32,
}

/// Offsets of a function's local variables and call parameters from its frame pointer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Frame {
    offsets: HashMap<Name, u32>,
    pub bytes: u32,
}

impl Frame {
    pub fn offset_of(&self, name: &str) -> Option<u32> {
        self.offsets.get(name).copied()
    }

    fn place(&mut self, name: &Name, align: u32, bytes: u32) {
        let at = align_up(self.bytes, align);
        self.offsets.insert(name.clone(), at);
        self.bytes = at.saturating_add(bytes);
    }
}

/// The addresses of all variables.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layout {
    /// Addresses in the variable's own space. Local variables are in `frames`.
    symbols: HashMap<Name, (Space, u64)>,
    pub shared: Vec<SharedVariable>,
    /// Offset and bytes of dynamic shared memory, if the module has arrays of it.
    pub dynamic: Option<(u32, u32)>,
    /// Static and dynamic shared memory of a CTA in bytes, as ptxas packs it.
    pub shared_bytes: u32,
    /// The end of the last shared variable: `shared_bytes`, plus the gaps of [`Placement::Declared`].
    pub shared_extent: u32,
    /// The least alignment that a shared variable promises; 0 when there is none.
    pub shared_align: u32,
    pub constants: Vec<u8>,
    pub variables: Vec<VariableRegion>,
    pub frames: Vec<Frame>,
}

impl Layout {
    pub fn new(
        module: &Module,
        entry: &str,
        buffers: usize,
        (dynamic_shared, placement): (u32, Placement),
    ) -> Result<Layout, EmuError> {
        let mut layout = Layout::default();
        let functions: Vec<&Function> = module.functions().collect();
        let inner = functions.iter().flat_map(|f| f.body.iter().flat_map(|b| &b.variables));
        for variable in module.variables().chain(inner) {
            check_size(variable)?;
            layout.place(variable, buffers)?;
        }
        layout.place_shared(&module.shared_variables(entry), dynamic_shared, placement);
        for function in functions {
            layout.frame(function)?;
        }
        layout.initialise(module, entry)?;
        Ok(layout)
    }

    /// Address of a symbol in its space.
    pub fn symbol(&self, name: &str) -> Option<(Space, u64)> {
        self.symbols.get(name).copied()
    }

    fn place(&mut self, variable: &Variable, buffers: usize) -> Result<(), EmuError> {
        let (align, bytes) = (variable.align.max(1), variable.bytes() as u32);
        match variable.space {
            Space::Const => {
                let start = self.constants.len().next_multiple_of(align as usize);
                check_total("constant memory", (start + bytes as usize) as u64, CONST_LIMIT)?;
                self.constants.resize(start + bytes as usize, 0);
                self.symbols.insert(variable.name.clone(), (Space::Const, CONST_BASE + start as u64));
            }
            Space::Global => {
                let index = buffers + self.variables.len();
                let total = self.variables.iter().map(|v| v.contents.len() as u64).sum::<u64>();
                check_total("global variables", total + u64::from(bytes), GLOBAL_LIMIT)?;
                self.variables.push(VariableRegion {
                    name: variable.name.to_string(),
                    contents: vec![0; variable.bytes() as usize],
                });
                self.symbols.insert(variable.name.clone(), (Space::Global, GlobalMemory::base(index)));
            }
            _ => {}
        }
        Ok(())
    }

    /// Places shared variables in this order, from offset 0 on, followed by dynamic shared memory. All arrays
    /// of dynamic shared memory begin at the same address.
    fn place_shared(&mut self, variables: &[&Variable], dynamic: u32, placement: Placement) {
        let (arrays, fixed): (Vec<&Variable>, Vec<&Variable>) =
            variables.iter().partition(|v| v.bytes() == 0);
        for variable in fixed {
            let start = self.next_shared(variable.align, variable.bytes() as u32, placement);
            self.add_shared(variable, start, variable.bytes() as u32);
        }
        if arrays.is_empty() && dynamic == 0 {
            return;
        }
        let align = arrays.iter().map(|v| v.align).fold(DYNAMIC_ALIGN, u32::max);
        let start = self.next_shared(align, dynamic, placement);
        self.dynamic = (!arrays.is_empty()).then_some((start, dynamic));
        for variable in arrays {
            self.add_shared(variable, start, dynamic);
        }
    }

    /// Reserves memory for a variable and returns its offset.
    fn next_shared(&mut self, align: u32, bytes: u32, placement: Placement) -> u32 {
        self.shared_bytes = align_up(self.shared_bytes, align).saturating_add(bytes);
        let start = match placement {
            Placement::Ptxas => align_up(self.shared_extent, align),
            Placement::Declared => exactly_aligned(self.shared_extent, align),
        };
        self.shared_extent = start.saturating_add(bytes);
        start
    }

    fn add_shared(&mut self, variable: &Variable, start: u32, bytes: u32) {
        let align =
            if variable.bytes() == 0 { variable.align.max(DYNAMIC_ALIGN) } else { variable.align.max(1) };
        self.shared.push(SharedVariable { name: variable.name.to_string(), start, bytes, align });
        self.symbols.insert(variable.name.clone(), (Space::Shared, SHARED_BASE + u64::from(start)));
        self.shared_align = if self.shared_align == 0 { align } else { self.shared_align.min(align) };
    }

    fn frame(&mut self, function: &Function) -> Result<(), EmuError> {
        let mut frame = Frame::default();
        let is_func = function.kind == ptx::FunctionKind::Func;
        for param in function.params.iter().chain(&function.returns) {
            if is_func && param.space == ParamSpace::Param {
                frame.place(&param.name, param.align, param.bytes());
            }
        }
        for v in function.body.iter().flat_map(|b| &b.variables) {
            if matches!(v.space, Space::Local | Space::Param) {
                frame.place(&v.name, v.align, v.bytes() as u32);
            }
        }
        frame.bytes = align_up(frame.bytes, 16);
        check_total("local memory of a thread", u64::from(frame.bytes), LOCAL_LIMIT)?;
        if !is_func {
            let mut at = 0;
            for param in &function.params {
                at = align_up(at, param.align);
                self.symbols.insert(param_key(&function.name, &param.name), (Space::Param, u64::from(at)));
                at = at.saturating_add(param.bytes());
            }
        }
        self.frames.push(frame);
        Ok(())
    }

    /// Address of a parameter of an entry.
    pub fn entry_param(&self, entry: &str, name: &str) -> Option<u64> {
        self.symbol(&param_key(entry, name)).map(|(_, address)| address)
    }

    fn initialise(&mut self, module: &Module, entry: &str) -> Result<(), EmuError> {
        let used = module.names_used(entry);
        let mut global = 0;
        for variable in module.variables() {
            let contents = match &variable.init {
                None => Vec::new(),
                Some(Initializer::Bytes(bytes)) => bytes.clone(),
                // No function that runs uses the variable, so its contents do not matter.
                Some(Initializer::Addresses(_)) if !used.contains(&*variable.name) => Vec::new(),
                Some(Initializer::Addresses(list)) => self.addresses(list)?,
            };
            let target = match (variable.space, self.symbol(&variable.name)) {
                (Space::Global, _) => {
                    global += 1;
                    &mut self.variables[global - 1].contents[..]
                }
                (Space::Const, Some((_, at))) => &mut self.constants[(at - CONST_BASE) as usize..],
                _ => continue,
            };
            let bytes = contents.len().min(target.len());
            target[..bytes].copy_from_slice(&contents[..bytes]);
        }
        Ok(())
    }

    fn addresses(&self, list: &[(Name, i64)]) -> Result<Vec<u8>, EmuError> {
        let mut bytes = Vec::new();
        for (name, offset) in list {
            let (space, address) = self.symbol(name).ok_or_else(|| EmuError::Unsupported {
                line: 0,
                what: format!("the address of `{name}` as an initial value"),
            })?;
            let generic = crate::memory::window(space) + address;
            bytes.extend(generic.wrapping_add_signed(*offset).to_le_bytes());
        }
        Ok(bytes)
    }

    /// The shared variable at an offset from the start of shared memory.
    pub fn shared_variable(&self, offset: u32) -> Option<&SharedVariable> {
        self.shared.iter().find(|v| (v.start..v.start.saturating_add(v.bytes)).contains(&offset))
    }

    /// The name of the variable that contains an offset in shared memory, or of the nearest variable, and the
    /// offset from the start of that variable.
    pub fn shared_place(&self, offset: i64) -> (String, i64) {
        let inside =
            |v: &&SharedVariable| (i64::from(v.start)..i64::from(v.start + v.bytes)).contains(&offset);
        let nearest = self.shared.iter().find(inside).or_else(|| {
            self.shared.iter().min_by_key(|v| {
                offset.abs_diff(i64::from(v.start)).min(offset.abs_diff(i64::from(v.start + v.bytes)))
            })
        });
        match nearest {
            Some(v) => (v.name.clone(), offset.wrapping_sub(i64::from(v.start))),
            None => (String::new(), offset),
        }
    }
}

/// The next offset in shared memory that has this alignment but no larger one.
fn exactly_aligned(at: u32, align: u32) -> u32 {
    let start = align_up(at, align);
    let more = (SHARED_BASE + u64::from(start)).is_multiple_of(2 * u64::from(align.max(1)));
    if more { start.saturating_add(align) } else { start }
}

/// The next multiple of an alignment. On overflow, returns the largest number, which exceeds every limit.
fn align_up(at: u32, align: u32) -> u32 {
    at.checked_next_multiple_of(align.max(1)).unwrap_or(u32::MAX)
}

/// Alignment of dynamic shared memory, whatever its declaration says (ptxas 13.0).
const DYNAMIC_ALIGN: u32 = 16;

const CONST_LIMIT: u64 = 64 << 10;
const LOCAL_LIMIT: u64 = 512 << 10;
const GLOBAL_LIMIT: u64 = 1 << 30;
const ALIGN_LIMIT: u32 = 1 << 16;

/// Checks the total size of all variables of a space.
fn check_total(what: &'static str, bytes: u64, limit: u64) -> Result<(), EmuError> {
    if bytes <= limit {
        return Ok(());
    }
    Err(EmuError::Launch {
        what,
        given: format!("{bytes} bytes"),
        accepted: format!("at most {limit} bytes"),
    })
}

/// Checks a variable against the hardware's size of its space (CUDA C++ Programming Guide, "Compute
/// Capabilities"). A variable in global memory is checked against a limit that suffices for tests.
fn check_size(variable: &Variable) -> Result<(), EmuError> {
    let limit: u64 = match variable.space {
        Space::Const => CONST_LIMIT,
        Space::Local => LOCAL_LIMIT,
        Space::Shared | Space::SharedCluster => 256 << 10,
        Space::Param => 32 << 10,
        Space::Generic | Space::Global => GLOBAL_LIMIT,
    };
    let size = variable
        .dims
        .iter()
        .try_fold(u64::from(variable.ty.bytes() * variable.vector), |n, d| n.checked_mul(*d));
    match size {
        Some(bytes) if bytes <= limit && variable.align <= ALIGN_LIMIT => Ok(()),
        _ => Err(EmuError::Launch {
            what: "size of a variable",
            given: format!(
                "{} of {} `{}`",
                size_of(size, variable.align),
                variable.space.suffix(),
                variable.name
            ),
            accepted: format!("at most {limit} bytes, aligned to at most {ALIGN_LIMIT}"),
        }),
    }
}

/// Text for the size of a variable.
fn size_of(bytes: Option<u64>, align: u32) -> String {
    let bytes = bytes.map_or_else(|| "2^64 bytes or more".to_owned(), |bytes| format!("{bytes} bytes"));
    format!("{bytes}, aligned to {align}")
}

/// A key for a parameter that includes the entry, because parameters of different entries may share a name.
fn param_key(entry: &str, name: &str) -> Name {
    format!("{entry}({name})").into()
}
