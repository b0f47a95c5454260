//! Suggests a first launch file from the signature of a kernel.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use ptx::{Base, Function, Instruction, Module, Op, Operand, Param, Reg, Space, TensorMapSpec, Type};

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
type Origin = (usize, i64);

/// Elements of a suggested buffer: more than a small launch reads.
const ELEMENTS: usize = 1 << 16;

/// Writes a launch file for an entry of the module: `entry`, or the only one. Grid, sizes and contents are
/// guesses, which comments mark as such.
///
/// # Errors
/// When the module has no such entry, or several and none is named.
pub fn suggest(module: &Module, entry: Option<&str>) -> Result<String, LaunchError> {
    let function = LaunchStep::named(entry).pick_entry(module, "launch")?;
    let uses = uses(function);
    let named = module.entries().zip(names(module)).find(|(entry, _)| entry.name == function.name);
    let name = named.map_or(Cow::Borrowed(&*function.name), |(_, name)| name);
    let block = match (function.bounds.required_threads, function.bounds.max_threads) {
        (Some(threads), _) => threads,
        (None, Some([x, y, z])) => [x, y.max(1), z.max(1)],
        (None, None) => [128, 1, 1],
    };
    let cluster = function.bounds.required_cluster.map_or([1; 3], |c| c.map(|n| n.max(1)));
    let mut text = String::from(
        "# A first launch file. Lines with `?` are guesses: state the sizes and contents that your host code has.\n",
    );
    let _ = write!(
        text,
        "[launch]\nentry = \"{}\"\ngrid = {cluster:?}  # ? CTAs\nblock = {block:?}{}\ndynamic_shared = 0  # ? bytes{}\n",
        name,
        if function.bounds.required_threads.is_some() { "" } else { "  # ? threads" },
        if module.shared_variables(&function.name).iter().any(|variable| variable.bytes() == 0) {
            "; the kernel uses dynamic shared memory"
        } else {
            ""
        },
    );
    let mut pointed = String::new();
    for (index, param) in function.params.iter().enumerate() {
        let _ = write!(text, "\n[[arg]]  # {}\n", demangle(&declaration(param)));
        text += &match param.elements {
            Some(_) if !is_map(param) => structure(function, index, &uses, &mut pointed),
            _ => argument(param, uses.get(&(index, 0)).copied().unwrap_or_default()),
        };
    }
    text += &pointed;
    let mut outputs =
        function.params.iter().enumerate().filter(|(index, param)| {
            param.elements.is_none() && uses.get(&(*index, 0)).is_some_and(is_output)
        });
    if let Some((index, _)) = outputs.next_back() {
        let _ = write!(
            text,
            "\n# What the output must be; without it only hazards are looked for.\n# [reference]\n# output = {index}\n\
             # builtin = \"softmax\"\n# or kernel = \"other.cu\", file = \"expected.npy\", \
             python = \"reference.py:function\"\n\
             # inputs = []\n"
        );
    }
    Ok(text)
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

/// A struct by value, with a field for each offset that the kernel loads. The memory to which its pointers
/// refer is appended to `pointed`.
fn structure(
    function: &Function,
    index: usize,
    uses: &BTreeMap<Origin, Use>,
    pointed: &mut String,
) -> String {
    let param = &function.params[index];
    let mut loads: BTreeMap<i64, (Type, u8)> = BTreeMap::new();
    for instruction in function.instructions() {
        if let Some((_, offset)) = loaded(function, instruction).filter(|(from, _)| *from == index)
            && let Op::Ld(m) = instruction.op
        {
            loads.entry(offset).or_insert((m.ty, m.vector.max(1)));
        }
    }
    let mut text = String::from("role = \"struct\"\nfields = [  # ? what the kernel loads\n");
    let mut end = 0;
    for (offset, (ty, count)) in loads {
        if offset < end {
            continue;
        }
        end = offset + i64::from(ty.bytes()) * i64::from(count);
        let field = match uses.get(&(index, offset)).filter(|used| used.is_address) {
            Some(used) => {
                let name = format!("arg{index}_{offset}");
                let _ = write!(
                    pointed,
                    "\n[[arg]]  # the memory of the pointer at byte {offset} of [[arg]] {index}\nname = \"{name}\"\n\
                     parameter = false\n{}",
                    buffer(*used)
                );
                format!("role = \"pointer\", of = \"{name}\"")
            }
            None => {
                let (role, value) = number(ty);
                let values = vec![value; usize::from(count)].join(", ");
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

/// A buffer that is used like this.
fn buffer(used: Use) -> String {
    let dtype = used.ty.map_or("f32", element);
    let init = match (used.read, used.written) {
        (false, true) => "init = \"uninitialised\"  # the kernel only writes it",
        (true, true) => "init = \"zeros\"  # ? the kernel reads and writes it",
        _ => "init = \"random\"  # ?",
    };
    format!("role = \"buffer\"\ndtype = \"{dtype}\"  # ?\nelements = {ELEMENTS}  # ?\n{init}\n")
}

/// The role and a value of a number of this type.
fn number(ty: Type) -> (&'static str, &'static str) {
    match ty {
        Type::F32 => ("f32", "1.0"),
        Type::F64 => ("f64", "1.0"),
        ty => (integer(ty), "1"),
    }
}

fn argument(param: &Param, used: Use) -> String {
    if is_map(param) {
        return "role = \"tensor_map\"\ndtype = \"f16\"  # ?\nelements = 65536  # ?\ninit = \"random\"\n\
                dims = [256, 256]  # ? elements, innermost first\nbox = [64, 64]  # ? what one copy moves\n\
                swizzle = \"none\"  # ?\n"
            .to_owned();
    }
    if used.is_address || param.pointer.is_some() {
        return buffer(used);
    }
    let (role, value) = number(param.ty);
    format!("role = \"{role}\"\nvalue = {value}  # ?\n")
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
        let text = suggest(&module, None).unwrap();
        let spec: LaunchSpec = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
        for field in [
            "{ role = \"u32\", value = [1, 1], offset = 8 },",
            "{ role = \"pointer\", of = \"arg0_16\", offset = 16 },",
            "{ role = \"f32\", value = 1.0, offset = 176 },",
            "bytes = 184",
            "the kernel uses dynamic shared memory",
        ] {
            assert!(text.contains(field), "{field}\n{text}");
        }
        assert_eq!(spec.bind(module).unwrap().kernel.buffers.len(), 1);
    }

    #[test]
    fn a_suggestion_is_a_launch_file_for_its_kernel() {
        let module = ptx::parse(MODULE).unwrap().verify().unwrap();
        let text = suggest(&module, None).unwrap();
        let spec: LaunchSpec = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
        let roles: Vec<&str> = spec.args.iter().map(crate::launchfile::ArgSpec::role).collect();
        assert_eq!(roles, ["buffer", "buffer", "u32", "f32", "u64"], "{text}");
        assert!(text.contains("block = [96, 1, 1]") && text.contains("dtype = \"f16\""), "{text}");
        assert!(text.contains("only writes it"), "{text}");
        assert_eq!(spec.bind(module).unwrap().kernel.entry, "k");
    }
}
