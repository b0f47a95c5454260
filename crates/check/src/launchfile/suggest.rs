//! Suggests a first launch file from the signature of a kernel.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use ptx::{
    Base, Function, Instruction, Module, Op, Operand, Param, Reg, Space, SpecialReg, TensorMapSpec, Type,
};

use super::LaunchError;
use super::bind::names;
use super::spec::LaunchStep;
use crate::names::demangle;

/// How the code uses the memory to which a parameter points.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Use {
    /// The type of the first access.
    ty: Option<Type>,
    read: bool,
    written: bool,
    is_address: bool,
}

/// A parameter, by its number, or a field of one: bytes from its start.
pub(super) type Origin = (usize, i64);

/// Elements of a suggested buffer: more than a small launch reads.
const ELEMENTS: u64 = 1 << 16;

const HEAD: &str = "# A first launch file. Lines with `?` are guesses: state the sizes and contents that your host \
                    code has.\n";

/// The launch and the value of all sizes in a suggestion: two CTAs along each axis along which the kernel
/// reads its number, the last of them with work for some of its threads.
struct Extents {
    grid: [u32; 3],
    block: [u32; 3],
    /// The number of integers that are taken for sizes.
    sizes: usize,
}

impl Extents {
    fn of(function: &Function, cluster: [u32; 3], sizes: usize) -> Extents {
        let reads = |special: SpecialReg| {
            let is = |operand: &Operand| matches!(operand, Operand::Special(found) if *found == special);
            function.instructions().any(|instruction| instruction.operands.iter().any(is))
        };
        let ctas = [SpecialReg::CtaidX, SpecialReg::CtaidY, SpecialReg::CtaidZ].map(reads);
        let in_clusters = [SpecialReg::ClusteridX, SpecialReg::ClusteridY, SpecialReg::ClusteridZ].map(reads);
        let bounds = &function.bounds;
        let block = match (bounds.required_threads, bounds.max_threads) {
            (Some(threads), _) => threads,
            (None, Some([x, y, z])) if y.max(z) > 1 => [x, y.max(1), z.max(1)],
            (None, max) => {
                let all = max.map_or(if reads(SpecialReg::TidY) { 256 } else { 128 }, |[x, ..]| x);
                match (reads(SpecialReg::TidY), reads(SpecialReg::TidZ)) {
                    (_, true) if all >= 64 => [8, 8, all / 64],
                    (true, _) if all >= 16 => [16, all / 16, 1],
                    _ => [all, 1, 1],
                }
            }
        };
        let grid = [0, 1, 2]
            .map(|axis| if ctas[axis] || in_clusters[axis] { 2 * cluster[axis] } else { cluster[axis] });
        Extents { grid, block, sizes }
    }

    /// A multiple of 8 where possible, as vectors need. The product of all sizes is at most [`ELEMENTS`].
    fn size(&self) -> u64 {
        let threads = u64::from(self.grid[0]) * u64::from(self.block[0]);
        let product = |size: &u64| size.checked_pow(self.sizes as u32).is_some_and(|all| all <= ELEMENTS);
        let fits = (1..threads.saturating_sub(7)).take_while(product).last().unwrap_or(1);
        if fits < 8 { fits } else { fits & !7 }
    }

    /// A comment about the sizes. `rest` says which block they leave a rest.
    fn comment(&self, rest: &str) -> String {
        let size = self.size();
        let product = match self.sizes {
            0 => return String::new(),
            1 => String::new(),
            sizes => format!(",\n# and a buffer holds the product of {sizes}"),
        };
        format!("# Integers are taken for sizes: {size}, so that {rest} has a rest{product}.\n")
    }
}

/// Writes a launch file for an entry of the module: `entry`, or the only one. Grid, sizes and contents are
/// guesses, which comments mark as such. Names and types of parameters are those of the CUDA C++ `sources`,
/// where these declare the kernel, else those of the PTX.
///
/// # Errors
/// When the module has no such entry, or several and none is named.
pub fn suggest(
    module: &Module,
    entry: Option<&str>,
    sources: &[host::cuda::Source],
) -> Result<String, LaunchError> {
    let function = LaunchStep::named(entry).pick_entry(module, "launch")?;
    let uses = uses(function);
    let named = module.entries().zip(names(module)).find(|(entry, _)| entry.name == function.name);
    let name = named.map_or(Cow::Borrowed(&*function.name), |(_, name)| name);
    let declared = host::cuda::parameters(sources, &demangle(&name));
    let declared = declared.filter(|declared| declared.len() == function.params.len()).unwrap_or_default();
    let cluster = function.bounds.required_cluster.map_or([1; 3], |c| c.map(|n| n.max(1)));
    let extents = Extents::of(function, cluster, sizes(function, &uses, &declared));
    let (ctas, threads) = (extents.grid[0], extents.block[0]);
    let mut text =
        HEAD.to_owned() + &extents.comment(&format!("the last of {ctas} CTAs of {threads} threads along x"));
    let _ = write!(
        text,
        "[launch]\nentry = \"{}\"\ngrid = {:?}  # ? CTAs\nblock = {:?}{}\ndynamic_shared = 0  # ? bytes{}\n",
        name,
        extents.grid,
        extents.block,
        if function.bounds.required_threads.is_some() { "" } else { "  # ? threads" },
        if module.shared_variables(&function.name).iter().any(|variable| variable.bytes() == 0) {
            "; the kernel uses dynamic shared memory"
        } else {
            ""
        },
    );
    let mut pointed = String::new();
    let size = extents.size();
    for (index, param) in function.params.iter().enumerate() {
        let declared = declared.get(index);
        let shown = declared.map_or_else(|| demangle(&declaration(param)).into_owned(), |d| d.text.clone());
        let _ = write!(text, "\n[[arg]]  # {shown}\n");
        if let Some(declared) = declared {
            let _ = writeln!(text, "name = \"{}\"", declared.name);
        }
        text += &match param.elements {
            Some(_) if !is_map(param) => structure(function, index, &uses, size, &mut pointed),
            _ => argument(param, uses.get(&(index, 0)).copied().unwrap_or_default(), declared, size),
        };
    }
    text += &pointed;
    let mut outputs =
        function.params.iter().enumerate().filter(|(index, param)| {
            param.elements.is_none() && uses.get(&(*index, 0)).is_some_and(is_output)
        });
    if let Some((index, _)) = outputs.next_back() {
        let called =
            |index: usize| declared.get(index).map_or(index.to_string(), |d| format!("\"{}\"", d.name));
        let reads = |index: &usize| uses.get(&(*index, 0)).is_some_and(|used| used.read && !used.written);
        let inputs: Vec<String> = (0..function.params.len()).filter(reads).map(called).collect();
        text += &reference(&called(index), &inputs);
    }
    Ok(text)
}

/// The comment that shows how the expected output is stated.
fn reference(output: &str, inputs: &[String]) -> String {
    format!(
        "\n# What the output must be; without it only hazards are looked for.\n\
         # A built-in needs the buffers' shapes: `shape = [rows, columns]` in place of `elements`.\n\
         # [reference]\n# output = {output}\n\
         # builtin = \"softmax\"\n# or kernel = \"other.cu\", file = \"expected.npy\", \
         python = \"reference.py:function\"\n\
         # inputs = [{}]\n",
        inputs.join(", ")
    )
}

fn declaration(param: &Param) -> String {
    match param.elements {
        Some(n) => format!(".align {} .{} {}[{n}]", param.align, param.ty, param.name),
        None => format!(".{} {}", param.ty, param.name),
    }
}

fn is_output(used: &Use) -> bool {
    used.written && !used.read
}

fn is_map(param: &Param) -> bool {
    param.bytes() == TensorMapSpec::BYTES && param.align >= TensorMapSpec::ALIGN
}

/// The fields of a struct by value that the kernel loads: offset, type and number of values.
fn fields(function: &Function, index: usize) -> Vec<(i64, Type, u8)> {
    let mut loads: BTreeMap<i64, (Type, u8)> = BTreeMap::new();
    for instruction in function.instructions() {
        if let Some((_, offset)) = loaded(function, instruction).filter(|(from, _)| *from == index)
            && let Op::Ld(m) = instruction.op
        {
            loads.entry(offset).or_insert((m.ty, m.vector.max(1)));
        }
    }
    let mut end = 0;
    let mut apart = |(offset, (ty, count)): (i64, (Type, u8))| {
        let is_apart = offset >= end;
        if is_apart {
            end = offset + i64::from(ty.bytes()) * i64::from(count);
        }
        is_apart.then_some((offset, ty, count))
    };
    loads.into_iter().filter_map(&mut apart).collect()
}

/// The number of integers among the parameters and their fields that may be sizes.
fn sizes(function: &Function, uses: &BTreeMap<Origin, Use>, declared: &[host::cuda::Parameter]) -> usize {
    let is_address = |index, offset| uses.get(&(index, offset)).is_some_and(|used| used.is_address);
    let of = |(index, param): (usize, &Param)| match param.elements {
        Some(_) if !is_map(param) => fields(function, index)
            .into_iter()
            .filter(|(offset, ty, _)| is_size(number(*ty)) && !is_address(index, *offset))
            .map(|(.., count)| usize::from(count))
            .sum(),
        _ => {
            let used = uses.get(&(index, 0)).copied().unwrap_or_default();
            usize::from(scalar(param, used, declared.get(index)).is_some_and(is_size))
        }
    };
    function.params.iter().enumerate().map(of).sum()
}

/// A struct by value, with a field for each offset that the kernel loads. The memory to which its pointers
/// refer is appended to `pointed`.
fn structure(
    function: &Function,
    index: usize,
    uses: &BTreeMap<Origin, Use>,
    size: u64,
    pointed: &mut String,
) -> String {
    let param = &function.params[index];
    let mut text = String::from("role = \"struct\"\nfields = [  # ? what the kernel loads\n");
    for (offset, ty, count) in fields(function, index) {
        let field = match uses.get(&(index, offset)).filter(|used| used.is_address) {
            Some(used) => {
                let name = format!("arg{index}_{offset}");
                let _ = write!(
                    pointed,
                    "\n[[arg]]  # the memory of the pointer at byte {offset} of [[arg]] {index}\nname = \"{name}\"\n\
                     parameter = false\n{}",
                    buffer(*used, None)
                );
                format!("role = \"pointer\", of = \"{name}\"")
            }
            None => {
                let role = number(ty);
                let values = vec![value(role, size); usize::from(count)].join(", ");
                format!(
                    "role = \"{role}\", value = {}",
                    if count > 1 { format!("[{values}]") } else { values }
                )
            }
        };
        let _ = writeln!(text, "    {{ {field}, offset = {offset} }},");
    }
    let maps = param.align >= TensorMapSpec::ALIGN && param.bytes() >= TensorMapSpec::BYTES;
    text += if maps { "    # ? { role = \"tensor_map\", of = … } for each tensor map\n]\n" } else { "]\n" };
    text + &format!("bytes = {}\n", param.bytes())
}

/// A buffer that is used like this, of the type that the source declares.
fn buffer(used: Use, declared: Option<&str>) -> String {
    let (dtype, mark) = match declared {
        Some(dtype) => (dtype, ""),
        None => (used.ty.map_or("f32", element), "  # ?"),
    };
    let init = match (used.read, used.written) {
        (false, true) => "init = \"uninitialised\"  # the kernel only writes it",
        (true, true) => "init = \"zeros\"  # ? the kernel reads and writes it",
        _ => "init = \"random\"  # ?",
    };
    format!("role = \"buffer\"\ndtype = \"{dtype}\"{mark}\nelements = {ELEMENTS}  # ?\n{init}\n")
}

/// The role of a number of this type.
const fn number(ty: Type) -> &'static str {
    match ty {
        Type::F32 => "f32",
        Type::F64 => "f64",
        ty => integer(ty),
    }
}

/// Whether a number of this role may be a size.
fn is_size(role: &str) -> bool {
    matches!(role, "i32" | "u32" | "i64" | "u64")
}

/// A value for a number of this role.
fn value(role: &str, size: u64) -> String {
    match role {
        "bool" => "true".to_owned(),
        "f32" | "f64" => "1.0".to_owned(),
        role if is_size(role) => size.to_string(),
        _ => "1".to_owned(),
    }
}

/// The name in a launch file of a type of the source, without its pointer.
fn named(ty: &str) -> Option<&'static str> {
    let plain = ty.trim_start_matches("std::");
    let one = ["float", "double", "half", "int", "uint", "__half"].into_iter().find(|one| {
        // Vectors such as `float4` and `__half2`.
        plain.strip_prefix(one).is_some_and(|count| matches!(count, "2" | "3" | "4"))
    });
    Some(match one.unwrap_or(plain) {
        "half" | "__half" | "at::Half" | "c10::Half" => "f16",
        "float" => "f32",
        "double" => "f64",
        "char" | "signed char" | "int8_t" => "i8",
        "unsigned char" | "uint8_t" | "uchar" => "u8",
        "short" | "int16_t" => "i16",
        "unsigned short" | "uint16_t" | "ushort" => "u16",
        "__nv_bfloat16" | "nv_bfloat16" | "__nv_bfloat162" | "nv_bfloat162" | "at::BFloat16"
        | "c10::BFloat16" => "bf16",
        "__nv_fp8_e4m3" => "e4m3",
        "__nv_fp8_e5m2" => "e5m2",
        "int" | "int32_t" => "i32",
        "unsigned" | "unsigned int" | "uint32_t" | "uint" => "u32",
        "long" | "long long" | "int64_t" | "ptrdiff_t" => "i64",
        "unsigned long" | "unsigned long long" | "uint64_t" | "size_t" => "u64",
        _ => return None,
    })
}

/// The type of the memory to which a parameter of the source points.
fn of_pointer(declared: Option<&host::cuda::Parameter>) -> Option<&'static str> {
    named(declared?.ty.strip_suffix('*')?)
}

/// The role of a parameter that is a number; `None` for pointers and tensor maps.
fn scalar(param: &Param, used: Use, declared: Option<&host::cuda::Parameter>) -> Option<&'static str> {
    if is_map(param) || used.is_address || param.pointer.is_some() || of_pointer(declared).is_some() {
        return None;
    }
    let role = declared.and_then(|d| if d.ty == "bool" { Some("bool") } else { named(&d.ty) });
    let role = role.filter(|ty| !matches!(*ty, "f16" | "bf16" | "e4m3" | "e5m2"));
    Some(role.unwrap_or(number(param.ty)))
}

fn argument(param: &Param, used: Use, declared: Option<&host::cuda::Parameter>, size: u64) -> String {
    match scalar(param, used, declared) {
        Some(role) => format!("role = \"{role}\"\nvalue = {}  # ?\n", value(role, size)),
        None if is_map(param) => {
            "role = \"tensor_map\"\ndtype = \"f16\"  # ?\nelements = 65536  # ?\ninit = \"random\"\n\
                dims = [256, 256]  # ? elements, innermost first\nbox = [64, 64]  # ? what one copy moves\n\
                swizzle = \"none\"  # ?\n"
                .to_owned()
        }
        None => buffer(used, of_pointer(declared)),
    }
}

/// The value of a Triton constant, by its name: switches are off, and the rest is taken for blocks.
fn constant(name: &str, block: u32) -> String {
    let name = name.to_uppercase();
    let is_switch = ["IS_", "HAS_", "USE_", "EVEN_"].iter().any(|start| name.starts_with(start));
    match () {
        () if name.contains("TYPE") => "\"tl.float32\"".to_owned(),
        () if is_switch || name.contains("CAUSAL") => "false".to_owned(),
        () if name.contains("GROUP") => "8".to_owned(),
        () => block.to_string(),
    }
}

/// Writes a launch file for a Triton function.
pub fn suggest_triton(signature: &host::triton::TritonSignature) -> String {
    let parameters = &signature.parameters;
    let constants: Vec<&str> =
        parameters.iter().filter(|p| p.constant && p.default.is_none()).map(|p| p.name.as_str()).collect();
    // A tile has the product of its blocks. One block alone may be a whole row, which must fit.
    let blocks = |block| constants.iter().filter(|name| constant(name, block) == block.to_string()).count();
    let block = if blocks(256) > 1 { 32 } else { 256 };
    let arguments = || parameters.iter().filter(|p| !p.constant && p.default.is_none());
    let is_pointer = |p: &host::triton::Parameter| p.read || p.written || p.name.contains("ptr");
    let grid = [0, 1, 2].map(|axis| if signature.axes.contains(&axis) { 2 } else { 1 });
    let sizes = arguments().filter(|p| !is_pointer(p)).count();
    let tiles = if block == 256 { 1 } else { grid[0] };
    let extents = Extents { grid: [tiles, 1, 1], block: [block, 1, 1], sizes };
    let mut text = HEAD.to_owned() + &extents.comment(&format!("a block of {block}"));
    let _ = writeln!(text, "[launch]\ngrid = {grid:?}  # ? programs");
    if !constants.is_empty() {
        let values = constants.iter().map(|name| format!("{name} = {}", constant(name, block)));
        let _ = writeln!(text, "constexpr = {{ {} }}  # ?", values.collect::<Vec<_>>().join(", "));
    }
    for parameter in arguments() {
        let _ = write!(text, "\n[[arg]]\nname = \"{}\"\n", parameter.name);
        text += &match is_pointer(parameter) {
            true => buffer(Use { read: parameter.read, written: parameter.written, ..Use::default() }, None),
            false => format!("role = \"i32\"  # ?\nvalue = {}  # ?\n", extents.size()),
        };
    }
    if let Some(output) = arguments().rfind(|p| p.written && !p.read) {
        let quoted = |p: &host::triton::Parameter| format!("\"{}\"", p.name);
        let inputs: Vec<String> = arguments().filter(|p| p.read && !p.written).map(quoted).collect();
        text += &reference(&quoted(output), &inputs);
    }
    text
}

/// The number type of a parameter. `.bN` gives only the size.
const fn integer(ty: Type) -> &'static str {
    match ty {
        Type::U8 | Type::B8 => "u8",
        Type::S8 => "i8",
        Type::U16 => "u16",
        Type::S16 | Type::B16 => "i16",
        Type::U32 => "u32",
        Type::U64 => "u64",
        Type::S64 | Type::B64 => "i64",
        _ => "i32",
    }
}

/// The element type of memory that is accessed as this type.
const fn element(ty: Type) -> &'static str {
    match ty {
        Type::F64 => "f64",
        Type::F16 | Type::F16x2 => "f16",
        Type::Bf16 | Type::Bf16x2 => "bf16",
        Type::F32 => "f32",
        Type::B16 => "f16",
        Type::B32 => "f32",
        Type::B64 | Type::B128 => "f32",
        other => integer(other),
    }
}

/// The element type of the memory to which each parameter or field of one points, as the code accesses it.
pub(super) fn accessed(function: &Function) -> impl Iterator<Item = (Origin, &'static str)> {
    let typed = |(origin, used): (Origin, Use)| Some((origin, element(used.ty?)));
    uses(function).into_iter().filter_map(typed)
}

/// How each parameter is used. Addresses are followed through arithmetic, but not through memory.
fn uses(function: &Function) -> BTreeMap<Origin, Use> {
    let code: Vec<&Instruction> = function.instructions().collect();
    let origin = origins(function, &code);
    let mut uses: BTreeMap<Origin, Use> = BTreeMap::new();
    for instruction in &code {
        let mut note = |operand: &Operand, ty: Option<Type>, read: bool, written: bool| {
            let reg = match operand {
                Operand::Address(address) => match &address.base {
                    Base::Reg(reg) => *reg,
                    Base::Symbol(_) | Base::Absolute => return,
                },
                Operand::Reg(reg) => *reg,
                _ => return,
            };
            let Some(from) = origin.get(&reg) else { return };
            let used = uses.entry(*from).or_default();
            used.ty = used.ty.or(ty);
            used.read |= read;
            used.written |= written;
            used.is_address = true;
        };
        let addresses = instruction.operands.iter().filter(|operand| matches!(operand, Operand::Address(_)));
        match instruction.op {
            Op::Ld(m) if m.space != Space::Param => addresses.for_each(|a| note(a, Some(m.ty), true, false)),
            Op::St(m) => addresses.for_each(|a| note(a, Some(m.ty), false, true)),
            Op::Atom(m) | Op::Red(m) => addresses.for_each(|a| note(a, Some(m.ty), true, true)),
            Op::Cvta { .. } => instruction.operands.iter().skip(1).for_each(|o| note(o, None, false, false)),
            Op::WmmaStore(_) => addresses.for_each(|a| note(a, None, false, true)),
            Op::Ld(_) => {}
            _ => addresses.for_each(|a| note(a, None, true, false)),
        }
    }
    uses
}

/// The parameter or field that an instruction loads.
fn loaded(function: &Function, instruction: &Instruction) -> Option<Origin> {
    match (instruction.op, instruction.operands.last()) {
        (Op::Ld(m), Some(Operand::Address(address))) if m.space == Space::Param => match &address.base {
            Base::Symbol(name) => {
                let param = function.params.iter().position(|param| param.name == *name)?;
                Some((param, address.offset))
            }
            Base::Reg(_) | Base::Absolute => None,
        },
        _ => None,
    }
}

/// For each 64-bit register, the parameter or field from which it is computed.
fn origins(function: &Function, code: &[&Instruction]) -> BTreeMap<Reg, Origin> {
    let is_wide = |reg: Reg| {
        let registers = function.body.as_ref().map(|body| &body.registers);
        registers.and_then(|all| all.get(reg.0 as usize)).is_some_and(|register| register.ty.bytes() == 8)
    };
    let mut origin: BTreeMap<Reg, Origin> = BTreeMap::new();
    // Parameters that are converted to an address, or declared as pointers. The others are offsets.
    let declared = function.params.iter().enumerate().filter(|(_, param)| param.pointer.is_some());
    let mut pointers: BTreeSet<Origin> = declared.map(|(index, _)| (index, 0)).collect();
    // Each pass follows one more step of a loop. The set of registers that depend on parameters only grows.
    loop {
        let before = origin.len();
        for instruction in code {
            let known = |operand: &Operand| match operand {
                Operand::Reg(reg) => origin.get(reg).copied(),
                _ => None,
            };
            let from = || instruction.operands.iter().skip(1).filter_map(known);
            let source = match instruction.op {
                Op::Ld(_) => loaded(function, instruction),
                Op::Atom(_) => None,
                Op::Cvta { .. } => {
                    pointers.extend(from());
                    from().next()
                }
                _ => from().find(|from| pointers.contains(from)).or_else(|| from().next()),
            };
            if let (Some(source), Some(Operand::Reg(reg))) = (source, instruction.operands.first())
                && is_wide(*reg)
            {
                origin.entry(*reg).or_insert(source);
            }
        }
        if origin.len() == before {
            return origin;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launchfile::LaunchSpec;

    const MODULE: &str = ".version 7.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 y, .param .u32 n, .param .f32 s, .param .u64 stride)
.maxntid 96, 1, 1
{
    .reg .b64 %rd<9>;
    .reg .f32 %f<3>;
    .reg .b16 %h<2>;
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    ld.param.u64 %rd5, [stride];
    shl.b64 %rd6, %rd5, 2;
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    add.s64 %rd7, %rd6, %rd3;
    ld.global.f32 %f1, [%rd7];
    cvt.rn.f16.f32 %h1, %f1;
    st.global.b16 [%rd4], %h1;
    ret;
}
";

    /// A struct of a pointer, a pair of numbers and a number, and room that nothing loads.
    const STRUCT: &str = ".version 7.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 rows[];
.visible .entry k(.param .align 8 .b8 p[184])
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<4>;
    .reg .f32 %f<2>;
    ld.param.u64 %rd1, [p+16];
    ld.param.v2.u32 {%r1, %r2}, [p+8];
    ld.param.f32 %f1, [p+176];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r3, rows;
    st.global.f32 [%rd2], %f1;
    ret;
}
";

    #[test]
    fn a_struct_is_suggested_with_the_fields_that_the_kernel_loads() {
        let module = ptx::parse(STRUCT).unwrap().verify().unwrap();
        let text = suggest(&module, None, &[]).unwrap();
        let spec: LaunchSpec = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
        for field in [
            "{ role = \"u32\", value = [120, 120], offset = 8 },",
            "{ role = \"pointer\", of = \"arg0_16\", offset = 16 },",
            "{ role = \"f32\", value = 1.0, offset = 176 },",
            "bytes = 184",
            "the kernel uses dynamic shared memory",
        ] {
            assert!(text.contains(field), "{field}\n{text}");
        }
        assert_eq!(spec.bind(module).unwrap().kernel.buffers.len(), 1);
    }

    /// Names and types come from the source: `half` is `b16` in PTX, and PTX does not say which `int` is
    /// signed.
    #[test]
    fn a_suggestion_has_the_names_and_types_of_the_source() {
        let module = ptx::parse(MODULE).unwrap().verify().unwrap();
        let text =
            "__global__ void k(const float* x, half* __restrict__ y, int n, float s, size_t stride) {}";
        let sources = [host::cuda::Source { file: "k.cu".into(), text: text.to_owned() }];
        let text = suggest(&module, None, &sources).unwrap();
        for words in [
            "[[arg]]  # half* __restrict__ y\nname = \"y\"\nrole = \"buffer\"\ndtype = \"f16\"\n",
            "name = \"n\"\nrole = \"i32\"\nvalue = 88  # ?\n",
            "name = \"s\"\nrole = \"f32\"\nvalue = 1.0  # ?\n",
            "name = \"stride\"\nrole = \"u64\"",
            "# output = \"y\"\n",
            "# inputs = [\"x\"]\n",
        ] {
            assert!(text.contains(words), "{words}\n{text}");
        }
        let spec: LaunchSpec = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert_eq!(spec.bind(module).unwrap().kernel.entry, "k");
        // A source that declares other parameters does not count.
        let other =
            [host::cuda::Source { text: "__global__ void k(float* x) {}".to_owned(), ..sources[0].clone() }];
        let module = ptx::parse(MODULE).unwrap().verify().unwrap();
        assert!(!suggest(&module, None, &other).unwrap().contains("name = "));
        let types = ["float4", "__half2", "__nv_bfloat16", "unsigned char", "std::size_t", "T", "int3"];
        let known = types.map(named);
        assert_eq!(
            known,
            [Some("f32"), Some("f16"), Some("bf16"), Some("u8"), Some("u64"), None, Some("i32")]
        );
    }

    #[test]
    fn a_triton_function_gets_a_launch_file() {
        let parameter = |name: &str, read, written, constant| host::triton::Parameter {
            name: name.to_owned(),
            read,
            written,
            constant,
            default: None,
        };
        let parameters = [
            parameter("x", true, false, false),
            parameter("y", false, true, false),
            parameter("n", false, false, false),
            parameter("BLOCK", false, false, true),
        ];
        let signature = host::triton::TritonSignature { parameters: parameters.to_vec(), axes: vec![0] };
        let text = suggest_triton(&signature);
        assert!(text.contains("grid = [2, 1, 1]") && text.contains("value = 248  # ?"), "{text}");
        assert!(text.contains("# output = \"y\"\n") && text.ends_with("# inputs = [\"x\"]\n"), "{text}");
        let spec: LaunchSpec = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert_eq!(spec.triton_types().unwrap(), ["*fp32:16", "*fp32:16", "i32"]);
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(spec.triton_constants(&[]), [pair("BLOCK", "256")]);
        assert_eq!(spec.triton_constants(&[pair("BLOCK", "64")]), [pair("BLOCK", "64")]);
        let error = spec.without_constants("PTX").unwrap_err().to_string();
        assert!(error.contains("'BLOCK' for launch.constexpr"), "{error}");
        // A product has blocks along each of its dimensions, and switches.
        let names = ["BLOCK_M", "BLOCK_N", "GROUP_M", "HAS_BIAS", "OUT_DTYPE"];
        let parameters = [&parameters[..3], &names.map(|name| parameter(name, false, false, true))].concat();
        let text = suggest_triton(&host::triton::TritonSignature { parameters, axes: vec![0] });
        let spec: LaunchSpec = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
        let values: Vec<String> = spec.triton_constants(&[]).into_iter().map(|(_, value)| value).collect();
        assert_eq!(values, ["32", "32", "8", "False", "tl.float32"], "{text}");
    }

    /// Sizes leave a rest in the last CTA, and their product fits in a buffer.
    #[test]
    fn sizes_use_the_grid_and_fit_in_the_buffers() {
        let size = |grid, block, sizes| Extents { grid: [grid, 1, 1], block: [block, 1, 1], sizes }.size();
        let found = [(2, 128, 1), (2, 128, 2), (2, 128, 3), (2, 128, 4), (2, 128, 8), (2, 16, 3), (1, 1, 1)];
        assert_eq!(found.map(|(grid, block, n)| size(grid, block, n)), [248, 248, 40, 16, 4, 24, 1]);
        let indexed =
            MODULE.replace("    ret;", "    mov.u32 %r1, %ctaid.y;\n    mov.u32 %r1, %tid.y;\n    ret;");
        let indexed = indexed.replace("    .reg .f32 %f<3>;", "    .reg .f32 %f<3>;\n    .reg .b32 %r<2>;");
        let module = ptx::parse(&indexed).unwrap().verify().unwrap();
        let text = suggest(&module, None, &[]).unwrap();
        assert!(text.contains("grid = [1, 2, 1]") && text.contains("block = [16, 6, 1]"), "{text}");
        assert!(text.contains("sizes: 8, so that the last of 1 CTAs of 16 threads"), "{text}");
        assert!(text.contains("# and a buffer holds the product of 2.\n"), "{text}");
    }

    #[test]
    fn a_suggestion_is_a_launch_file_for_its_kernel() {
        let module = ptx::parse(MODULE).unwrap().verify().unwrap();
        let text = suggest(&module, None, &[]).unwrap();
        let spec: LaunchSpec = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
        let roles: Vec<&str> = spec.args.iter().map(crate::launchfile::ArgSpec::role).collect();
        assert_eq!(roles, ["buffer", "buffer", "u32", "f32", "u64"], "{text}");
        assert!(text.contains("block = [96, 1, 1]") && text.contains("dtype = \"f16\""), "{text}");
        assert!(text.contains("only writes it"), "{text}");
        assert_eq!(spec.bind(module).unwrap().kernel.entry, "k");
    }
}
