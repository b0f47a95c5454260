//! Finds products that are summed over a loop, as in a matrix product.

use std::collections::{HashMap, HashSet};

use ptx::{BinaryOp, Body, Imm, Instruction, Op, Operand, Reg, Statement, TernaryOp};

use super::evidence::Evidence;

/// The contents of a register inside a loop.
#[derive(Clone, Default)]
struct Value {
    /// The registers whose values at the start of the iteration are terms of this value. True: products were
    /// added to that term.
    terms: HashMap<Reg, bool>,
    /// The number of products that this value sums. A polynomial has 1, because each step adds to a constant.
    products: u32,
    /// Whether the value is a constant, or a power of two made of bits. A multiple by it is not counted as a
    /// product: `expf` multiplies by both.
    is_scale: bool,
}

impl Value {
    /// Adds the terms of another value.
    fn take(&mut self, terms: &HashMap<Reg, bool>, with_products: bool) {
        for (&term, &has) in terms {
            *self.terms.entry(term).or_default() |= has || with_products;
        }
    }
}

/// Whether a kernel executes multiply-adds that sum products over a loop. The multiply-adds of `expf` and of
/// polynomials, and the sum of a softmax (`l = l · α + p`), are not such sums. Neither is a sum of squares.
pub fn sums_products(evidence: &Evidence) -> bool {
    let executed: HashSet<usize> = evidence.executed.iter().map(|e| e.pc).collect();
    let mut first = 0;
    evidence.kernel.module.functions().flat_map(|f| f.body.iter()).any(|body| {
        let start = first;
        first += body.statements.iter().filter(|s| matches!(s, Statement::Inst(_))).count();
        body_sums_products(body, |at| executed.contains(&(start + at)))
    })
}

fn body_sums_products(body: &Body, executed: impl Fn(usize) -> bool) -> bool {
    let mut labels = HashMap::new();
    let mut instructions = Vec::new();
    for statement in &body.statements {
        match statement {
            Statement::Label(label) => drop(labels.insert(*label, instructions.len())),
            Statement::Inst(inst) => instructions.push(inst),
            Statement::Pragma(_) => {}
        }
    }
    let target = |inst: &Instruction| match (&inst.op, inst.operands.first()) {
        (Op::Bra { .. }, Some(Operand::Label(label))) => labels.get(label).copied(),
        _ => None,
    };
    let branches: Vec<(usize, usize)> =
        instructions.iter().enumerate().filter_map(|(at, inst)| Some((at, target(inst)?))).collect();
    // An instruction that a branch may skip does not replace the earlier value of its result.
    let mut skipped = vec![false; instructions.len()];
    for &(at, to) in branches.iter().filter(|(at, to)| to > at) {
        skipped[at + 1..to].fill(true);
    }
    branches.iter().filter(|(at, to)| to <= at).any(|&(end, start)| {
        let body = instructions[start..=end].iter().copied().enumerate();
        loop_sums_products(body.map(|(i, inst)| (inst, skipped[start + i], executed(start + i))))
    })
}

/// Follows values through one iteration. `body`: each instruction, whether a branch may skip it, and whether
/// the run executed it.
fn loop_sums_products<'a>(body: impl Iterator<Item = (&'a Instruction, bool, bool)>) -> bool {
    let mut values: HashMap<Reg, Value> = HashMap::new();
    for (inst, skipped, executed) in body {
        let result = if executed { result(inst, &values) } else { Value::default() };
        inst.registers_written(|reg| {
            let mut new = result.clone();
            if skipped || inst.guard.is_some() {
                new.take(&value(&values, reg).terms, false);
            }
            values.insert(reg, new);
        });
    }
    values.iter().any(|(reg, value)| value.terms.get(reg) == Some(&true))
}

fn value(values: &HashMap<Reg, Value>, reg: Reg) -> Value {
    let at_start = || Value { terms: HashMap::from([(reg, false)]), ..Value::default() };
    values.get(&reg).cloned().unwrap_or_else(at_start)
}

/// The value that an instruction computes from its operands.
fn result(inst: &Instruction, values: &HashMap<Reg, Value>) -> Value {
    let operand = |i: usize| match inst.operands.get(i) {
        Some(Operand::Reg(reg)) => value(values, *reg),
        operand => Value { is_scale: matches!(operand, Some(Operand::Imm(_))), ..Value::default() },
    };
    // A square is not a product of two matrices.
    let multiplies_two =
        || inst.operands.get(1) != inst.operands.get(2) && !operand(1).is_scale && !operand(2).is_scale;
    let mut result = Value::default();
    match inst.op {
        Op::Mov(_) | Op::Cvt { .. } => return operand(1),
        Op::Selp(_) => {
            result.take(&operand(1).terms, false);
            result.take(&operand(2).terms, false);
        }
        Op::Binary(BinaryOp::Add | BinaryOp::Sub, ..) => {
            let (a, b) = (operand(1), operand(2));
            result.take(&a.terms, b.products > 1);
            result.take(&b.terms, a.products > 1);
            result.is_scale = a.is_scale && b.is_scale;
        }
        // The exponent field of f32 begins at bit 23.
        Op::Binary(BinaryOp::Shl, ..) => {
            result.is_scale = matches!(inst.operands.get(2), Some(Operand::Imm(Imm::Int(23))));
        }
        Op::Binary(BinaryOp::Mul, ..) => {
            result.take(&operand(1).terms, false);
            result.take(&operand(2).terms, false);
            result.products = u32::from(multiplies_two());
        }
        Op::Ternary(TernaryOp::Fma | TernaryOp::Mad, ..) => {
            let (a, b, c) = (operand(1), operand(2), operand(3));
            result.take(&c.terms, multiplies_two());
            // A rescale: acc = acc · α + (p0 · v0 + p1 · v1).
            result.take(&a.terms, c.products > 1);
            result.take(&b.terms, c.products > 1);
            result.products = c.products + u32::from(multiplies_two());
        }
        _ => {}
    }
    result
}
