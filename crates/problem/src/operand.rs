//! The operands of a problem: every array that a pass reads or writes.
//!
//! [`Problem::operands`] is the only list of them. Whatever draws, reads, binds or judges operands loops over
//! this list, so a new operand is a variant of [`Operand`] and a row of the list.

use std::fmt;
use std::ops::{Index, IndexMut};

use crate::{DType, ElementType, Elements, PassKind, Problem, ProblemError, Score, Tensor, descale_name};

/// An array of lengths, of 32-bit signed integers ([`Lengths`](crate::Lengths)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LengthArray {
    /// `batch + 1` cumulative lengths of packed queries (`cu_seqlens_q`).
    CumulativeQ,
    /// `batch + 1` cumulative lengths of packed keys (`cu_seqlens_k`).
    CumulativeKv,
    /// `batch` used lengths of queries (`seqused_q`).
    UsedQ,
    /// `batch` used lengths of keys (`seqused_k`).
    UsedKv,
    /// `batch` numbers of padding rows before the first key (`leftpad_k`).
    LeftPad,
}

impl LengthArray {
    /// All arrays.
    pub const ALL: [LengthArray; 5] = [
        LengthArray::CumulativeQ,
        LengthArray::CumulativeKv,
        LengthArray::UsedQ,
        LengthArray::UsedKv,
        LengthArray::LeftPad,
    ];

    /// The array's name in FlashAttention's interface.
    pub const fn name(self) -> &'static str {
        match self {
            LengthArray::CumulativeQ => "cu_seqlens_q",
            LengthArray::CumulativeKv => "cu_seqlens_k",
            LengthArray::UsedQ => "seqused_q",
            LengthArray::UsedKv => "seqused_k",
            LengthArray::LeftPad => "leftpad_k",
        }
    }

    /// Number of elements; `None` if the problem does not have the array.
    pub const fn len(self, problem: &Problem) -> Option<usize> {
        let lengths = &problem.lengths;
        let (is_used, elements) = match self {
            LengthArray::CumulativeQ => (lengths.q.packed.is_some(), problem.batch + 1),
            LengthArray::CumulativeKv => (lengths.kv.packed.is_some(), problem.batch + 1),
            LengthArray::UsedQ => (lengths.q.used, problem.batch),
            LengthArray::UsedKv => (lengths.kv.used, problem.batch),
            LengthArray::LeftPad => (lengths.left_padded, problem.batch),
        };
        if is_used { Some(elements) } else { None }
    }
}

/// An array that a pass reads or writes. Names are FlashAttention's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operand {
    /// A tensor with strides.
    Tensor(Tensor),
    /// The log-sum-exp, f32, `[batch][head][row]`: an output of the forward pass, an input of the backward
    /// pass.
    Lse,
    /// An array of lengths.
    Lengths(LengthArray),
    /// The page table, i32, `[batch, max_pages]` ([`Pages`](crate::Pages)).
    PageTable,
    /// A logit per query head, f32 ([`Score::sink`](crate::Score::sink)).
    Sinks,
    /// A factor on the scores of each query head, f32 ([`Score::temperature`](crate::Score::temperature)).
    Temperature,
    /// The state of the generator of dropout, i32: the low and high words of the seed, then those of the
    /// offset ([`Dropout`](crate::Dropout)).
    RngState,
    /// O of the result from which the forward pass continues ([`Pass::Forward`](crate::Pass)), in the type
    /// and with the strides of O. In device memory it may be O itself.
    OutBefore,
    /// The LSE of that result, as the LSE.
    LseBefore,
    /// A table of the programs ([`Programs::tables`](crate::Programs::tables)).
    Table(u8),
    /// The descale factors of an input, f32 ([`Scales`](crate::Scales)).
    Descale(Tensor),
    /// The gradient of the LSE, f32, as the LSE ([`Pass::Backward`](crate::Pass)).
    DLse,
    /// The gradients of the sinks, f32 ([`Gradients::sinks`](crate::Gradients)).
    DSinks,
    /// The gradient of a table, f32 ([`Table::gradient`](crate::Table)).
    DTable(u8),
}

impl Operand {
    /// Queries.
    pub const Q: Operand = Operand::Tensor(Tensor::Q);
    /// Keys.
    pub const K: Operand = Operand::Tensor(Tensor::K);
    /// Values.
    pub const V: Operand = Operand::Tensor(Tensor::V);
    /// The output.
    pub const OUT: Operand = Operand::Tensor(Tensor::Out);

    /// The name in findings, errors and parameters of kernels.
    pub const fn name(self) -> &'static str {
        match self {
            Operand::Tensor(tensor) => tensor.name(),
            Operand::Lse => "lse",
            Operand::Lengths(array) => array.name(),
            Operand::PageTable => "page_table",
            Operand::Sinks => "sinks",
            Operand::Temperature => "temperature",
            Operand::RngState => "rng_state",
            Operand::OutBefore => "out_before",
            Operand::LseBefore => "lse_before",
            Operand::Descale(tensor) => descale_name(tensor),
            Operand::Table(0) => "table_0",
            Operand::Table(1) => "table_1",
            Operand::Table(2) => "table_2",
            Operand::Table(3) => "table_3",
            Operand::Table(4) => "table_4",
            Operand::Table(5) => "table_5",
            Operand::Table(6) => "table_6",
            Operand::Table(_) => "table_7",
            Operand::DLse => "d_lse",
            Operand::DSinks => "d_sinks",
            Operand::DTable(0) => "d_table_0",
            Operand::DTable(1) => "d_table_1",
            Operand::DTable(2) => "d_table_2",
            Operand::DTable(3) => "d_table_3",
            Operand::DTable(4) => "d_table_4",
            Operand::DTable(5) => "d_table_5",
            Operand::DTable(6) => "d_table_6",
            Operand::DTable(_) => "d_table_7",
        }
    }

    /// Whether the values multiply logits. They are finite and not negative.
    pub const fn is_factor(self) -> bool {
        matches!(self, Operand::Temperature | Operand::Descale(Tensor::Q | Tensor::K))
    }

    /// Whether a pass writes the operand; otherwise it reads it.
    pub const fn is_output(self, pass: PassKind) -> bool {
        match self {
            Operand::Tensor(tensor) => tensor.is_output(pass),
            Operand::Lse => matches!(pass, PassKind::Forward),
            Operand::DSinks | Operand::DTable(_) => true,
            Operand::Lengths(_)
            | Operand::Sinks
            | Operand::Temperature
            | Operand::RngState
            | Operand::OutBefore
            | Operand::LseBefore
            | Operand::Table(_)
            | Operand::Descale(_)
            | Operand::PageTable
            | Operand::DLse => false,
        }
    }
}

impl From<Tensor> for Operand {
    fn from(tensor: Tensor) -> Operand {
        Operand::Tensor(tensor)
    }
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Type and size of an operand of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperandSpec {
    /// The operand.
    pub operand: Operand,
    /// Type of the elements.
    pub dtype: ElementType,
    /// Number of elements from the lowest in memory to the highest, gaps between rows included.
    pub elements: usize,
}

impl OperandSpec {
    /// Size in bytes.
    pub const fn bytes(&self) -> usize {
        self.elements.saturating_mul(self.dtype.bytes())
    }

    /// Whether a caller may pass a larger array, whose first elements are used: tensors and tables are views
    /// into memory, and the elements of the other arrays are counted.
    const fn may_be_longer(&self) -> bool {
        matches!(self.operand, Operand::Tensor(_) | Operand::OutBefore | Operand::Table(_))
    }
}

impl Problem {
    /// Every operand of the problem, inputs and outputs, in the order of [`Operand`].
    pub fn operands(&self) -> impl Iterator<Item = OperandSpec> + '_ {
        let as_tensor = |operand, tensor| OperandSpec {
            operand,
            dtype: self.dtypes.of(tensor).into(),
            elements: self.span(tensor).map_or(0, |(elements, _)| elements),
        };
        let tensors = self.tensors().iter().map(move |&tensor| as_tensor(tensor.into(), tensor));
        let of = |operand, dtype, elements| OperandSpec { operand, dtype, elements };
        let of_rows = |operand| of(operand, ElementType::F32, self.lse_len());
        let lse = (self.pass.lse() || self.pass.is_backward()).then(|| of_rows(Operand::Lse));
        let lengths = LengthArray::ALL
            .into_iter()
            .filter_map(move |array| Some(of(Operand::Lengths(array), ElementType::I32, array.len(self)?)));
        let pages = self.storage.pages();
        let entries = pages.map(|pages| self.batch.saturating_mul(pages.per_sequence));
        let page_table = entries.map(|entries| of(Operand::PageTable, ElementType::I32, entries));
        let of_heads = Score::OPERANDS.into_iter().filter(|&operand| self.score.has(operand));
        let of_heads = of_heads.map(move |operand| of(operand, ElementType::F32, self.heads_q));
        let rng_state = self.dropout.map(|_| of(Operand::RngState, ElementType::I32, 4));
        let before = self.pass.continues();
        let before =
            before.then(|| [as_tensor(Operand::OutBefore, Tensor::Out), of_rows(Operand::LseBefore)]);
        let factors = self
            .scales
            .each()
            .map(move |(tensor, _)| of(Operand::Descale(tensor), ElementType::F32, self.scale_len(tensor)));
        let tables = (0..).zip(&self.programs.tables);
        let tables = tables.map(move |(i, table)| of(Operand::Table(i), table.dtype, table.span()));
        let d_lse = self.pass.d_lse().then(|| of_rows(Operand::DLse));
        let wants = self.pass.wants();
        let d_sinks = wants.sinks.then(|| of(Operand::DSinks, ElementType::F32, self.heads_q));
        let d_tables = (0..).zip(&self.programs.tables).filter(move |&(i, _)| wants.table(i));
        let d_tables =
            d_tables.map(move |(i, table)| of(Operand::DTable(i), ElementType::F32, table.gradient().span()));
        let inputs = tensors.chain(lse).chain(lengths).chain(page_table).chain(of_heads).chain(rng_state);
        let inputs = inputs.chain(before.into_iter().flatten()).chain(tables).chain(factors);
        inputs.chain(d_lse).chain(d_sinks).chain(d_tables)
    }

    /// Type and size of an operand; `None` if the problem does not have it.
    pub fn operand(&self, operand: Operand) -> Option<OperandSpec> {
        self.operands().find(|spec| spec.operand == operand)
    }

    /// The operands that the pass reads.
    pub fn inputs(&self) -> impl Iterator<Item = OperandSpec> + '_ {
        self.operands().filter(|spec| !spec.operand.is_output(self.pass.kind()))
    }

    /// The operands that the pass writes.
    pub fn outputs(&self) -> impl Iterator<Item = OperandSpec> + '_ {
        self.operands().filter(|spec| spec.operand.is_output(self.pass.kind()))
    }

    /// The inputs beside tensors and the LSE.
    pub fn other_inputs(&self) -> impl Iterator<Item = OperandSpec> + '_ {
        self.inputs().filter(|spec| !matches!(spec.operand, Operand::Tensor(_) | Operand::Lse))
    }

    /// Rejects inputs that are missing, that the problem does not have, and inputs of another type or size.
    /// `type_and_len` states the type and the number of elements of an input.
    ///
    /// # Errors
    /// [`ProblemError::Lengths`], [`ProblemError::OperandType`], [`ProblemError::OperandTooShort`].
    pub fn check_inputs<T>(
        &self,
        inputs: &OperandMap<T>,
        type_and_len: impl Fn(&T) -> (ElementType, usize),
    ) -> Result<(), ProblemError> {
        for spec in self.inputs() {
            let OperandSpec { operand, dtype: expected, elements } = spec;
            let argument = operand.name();
            let Some((dtype, len)) = inputs.get(operand).map(&type_and_len) else {
                if elements == 0 {
                    continue;
                }
                return Err(ProblemError::Lengths { argument, len: 0, expected: elements });
            };
            if dtype != expected {
                let (dtype, expected) = (dtype.name(), expected.name());
                return Err(ProblemError::OperandType { argument, dtype, expected });
            }
            if spec.may_be_longer() && len < elements {
                return Err(ProblemError::OperandTooShort { argument, len, needed: elements });
            }
            if !spec.may_be_longer() && len != elements {
                return Err(ProblemError::Lengths { argument, len, expected: elements });
            }
        }
        let unknown = |&(operand, input): &(Operand, &T)| {
            type_and_len(input).1 != 0 && self.inputs().all(|spec| spec.operand != operand)
        };
        match inputs.iter().find(unknown) {
            Some((operand, input)) => {
                let (argument, (_, len)) = (operand.name(), type_and_len(input));
                Err(ProblemError::Lengths { argument, len, expected: 0 })
            }
            None => Ok(()),
        }
    }
}

/// A value for some of the operands, in the order of [`Operand`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OperandMap<T> {
    entries: Vec<(Operand, T)>,
}

/// The inputs of a call, in host memory. A tensor's slice begins at its lowest element in memory, as
/// [`Problem::span`] describes, and so does a table's.
pub type Operands<'a> = OperandMap<Elements<'a>>;

impl<T> Default for OperandMap<T> {
    fn default() -> OperandMap<T> {
        OperandMap { entries: Vec::new() }
    }
}

impl<T> OperandMap<T> {
    /// The value of an operand.
    pub fn get(&self, operand: Operand) -> Option<&T> {
        self.entries.iter().find(|(key, _)| *key == operand).map(|(_, value)| value)
    }

    /// The value of an operand, to be changed.
    pub fn get_mut(&mut self, operand: Operand) -> Option<&mut T> {
        self.entries.iter_mut().find(|(key, _)| *key == operand).map(|(_, value)| value)
    }

    /// Sets the value of an operand and returns the former one.
    pub fn insert(&mut self, operand: Operand, value: T) -> Option<T> {
        match self.entries.binary_search_by_key(&operand, |&(key, _)| key) {
            Ok(at) => Some(std::mem::replace(&mut self.entries[at].1, value)),
            Err(at) => {
                self.entries.insert(at, (operand, value));
                None
            }
        }
    }

    /// Removes an operand and returns its value.
    pub fn remove(&mut self, operand: Operand) -> Option<T> {
        let at = self.entries.iter().position(|&(key, _)| key == operand)?;
        Some(self.entries.remove(at).1)
    }

    /// All operands that have a value, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Operand, &T)> {
        self.entries.iter().map(|(operand, value)| (*operand, value))
    }

    /// Another value for each operand.
    pub fn map<'a, U>(&'a self, mut of: impl FnMut(Operand, &'a T) -> U) -> OperandMap<U> {
        self.iter().map(|(operand, value)| (operand, of(operand, value))).collect()
    }
}

impl<T> Index<Operand> for OperandMap<T> {
    type Output = T;

    /// The value of an operand.
    ///
    /// # Panics
    /// If the operand has no value.
    fn index(&self, operand: Operand) -> &T {
        self.get(operand).unwrap_or_else(|| panic!("no value for {operand}"))
    }
}

impl<T> IndexMut<Operand> for OperandMap<T> {
    fn index_mut(&mut self, operand: Operand) -> &mut T {
        self.get_mut(operand).unwrap_or_else(|| panic!("no value for {operand}"))
    }
}

impl<T> FromIterator<(Operand, T)> for OperandMap<T> {
    fn from_iter<I: IntoIterator<Item = (Operand, T)>>(entries: I) -> OperandMap<T> {
        let mut map = OperandMap::default();
        map.extend(entries);
        map
    }
}

impl<T> Extend<(Operand, T)> for OperandMap<T> {
    fn extend<I: IntoIterator<Item = (Operand, T)>>(&mut self, entries: I) {
        for (operand, value) in entries {
            self.insert(operand, value);
        }
    }
}

impl<'a> OperandMap<Elements<'a>> {
    /// Q, K and V.
    pub fn qkv(q: impl Into<Elements<'a>>, k: impl Into<Elements<'a>>, v: impl Into<Elements<'a>>) -> Self {
        [(Operand::Q, q.into()), (Operand::K, k.into()), (Operand::V, v.into())].into_iter().collect()
    }

    /// The operands with one more.
    pub fn with(mut self, operand: Operand, elements: impl Into<Elements<'a>>) -> Self {
        self.insert(operand, elements.into());
        self
    }

    /// The elements of an array of f32; empty if it is missing or has another type.
    pub fn floats(&self, operand: Operand) -> &'a [f32] {
        match self.get(operand) {
            Some(&Elements::F32(elements)) => elements,
            _ => &[],
        }
    }

    /// The elements of an array of i32; empty if it is missing or has another type.
    pub fn integers(&self, operand: Operand) -> &'a [i32] {
        match self.get(operand) {
            Some(&Elements::I32(elements)) => elements,
            _ => &[],
        }
    }

    /// The elements of an array of lengths; empty if it is missing or has another type.
    pub fn lengths(&self, array: LengthArray) -> &'a [i32] {
        self.integers(Operand::Lengths(array))
    }

    /// The tables of the programs, in order.
    pub fn tables(&self) -> Vec<Elements<'a>> {
        let tables = self.iter().filter(|(operand, _)| matches!(operand, Operand::Table(_)));
        tables.map(|(_, elements)| *elements).collect()
    }
}

impl From<DType> for ElementType {
    fn from(dtype: DType) -> ElementType {
        match dtype {
            DType::F16 => ElementType::F16,
            DType::Bf16 => ElementType::Bf16,
            DType::F32 => ElementType::F32,
            DType::E4m3 => ElementType::E4m3,
            DType::E5m2 => ElementType::E5m2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Pass, ScaleLayout, SideLengths, Table};

    /// A problem with every operand.
    fn all() -> Problem {
        let mut p = Problem::new(2, 4, 8, 16, DType::E4m3);
        p.pass = Pass::Forward { lse: true, continues: true, invariant: None };
        p.lengths.q = SideLengths { packed: Some(16), used: true };
        p.lengths.kv = SideLengths { packed: Some(16), used: true };
        p.lengths.left_padded = true;
        p.score = p.score.with_operands(|_| true);
        p.dropout = Some(0.1);
        p.scales.q = Some(ScaleLayout::TENSOR);
        p.scales.k = Some(ScaleLayout::per_head(4));
        p.scales.v = Some(ScaleLayout::per_head(4));
        p.programs.score = Some("s + t0[h]".parse().unwrap());
        p.programs.tables = vec![Table::dense(ElementType::F32, &[4])];
        p
    }

    #[test]
    fn a_problem_lists_its_operands_in_order() {
        let names = |p: &Problem| p.operands().map(|spec| spec.operand.name()).collect::<Vec<_>>();
        assert_eq!(names(&Problem::mission()), ["q", "k", "v", "out"]);
        let expected = "q k v out lse cu_seqlens_q cu_seqlens_k seqused_q seqused_k leftpad_k sinks \
                        temperature rng_state out_before lse_before table_0 \
                        descale_q descale_k descale_v";
        assert_eq!(names(&all()).join(" "), expected);
        let sorted: Vec<Operand> = all().operands().map(|spec| spec.operand).collect();
        assert!(sorted.is_sorted());
        assert_eq!(all().operand(Operand::Lse).map(|lse| lse.bytes()), Some(4 * 4 * 16));
        assert_eq!(Problem::mission().operand(Operand::Sinks), None);
    }

    /// Each input is missed, and refused with another type or size, by its own name.
    #[test]
    fn wrong_inputs_are_named() {
        let p = all();
        let right: OperandMap<(ElementType, usize)> =
            p.inputs().map(|spec| (spec.operand, (spec.dtype, spec.elements))).collect();
        p.check_inputs(&right, |&input| input).unwrap();
        let refused =
            |inputs: &OperandMap<_>| p.check_inputs(inputs, |&input| input).unwrap_err().to_string();
        for (operand, &(dtype, elements)) in right.iter() {
            let mut missing = right.clone();
            missing.remove(operand);
            let counted = |len: usize| {
                format!("invalid value '{len}' for the number of elements of {operand}: expected {elements}")
            };
            assert_eq!(refused(&missing), counted(0));
            let mut typed = right.clone();
            typed.insert(operand, (ElementType::U8, elements));
            assert!(
                refused(&typed).contains(&format!("invalid value 'u8' for the element type of {operand}"))
            );
            let mut short = right.clone();
            short.insert(operand, (dtype, elements - 1));
            assert!(refused(&short).contains(operand.name()), "{}", refused(&short));
            let mut long = right.clone();
            long.insert(operand, (dtype, elements + 1));
            match operand {
                Operand::Tensor(_) | Operand::OutBefore | Operand::Table(_) => {
                    p.check_inputs(&long, |&input| input).unwrap();
                }
                _ => assert_eq!(refused(&long), counted(elements + 1)),
            }
        }
        let mut unknown = right.clone();
        unknown.insert(Operand::Table(1), (ElementType::F32, 7));
        assert!(refused(&unknown).ends_with("'7' for the number of elements of table_1: expected 0"));
        unknown.insert(Operand::Table(1), (ElementType::F32, 0));
        p.check_inputs(&unknown, |&input| input).unwrap();
    }

    /// Arrays without elements may be left out or given, whether a problem is empty or has no keys.
    #[test]
    fn inputs_without_elements_may_be_missing() {
        let with = |change: fn(&mut Problem)| {
            let mut p = Problem::new(2, 4, 8, 16, DType::F16);
            change(&mut p);
            p
        };
        for p in
            [with(|p| p.seq_kv = 0), with(|p| p.batch = 0), with(|p| p.heads_q = 0), with(|p| p.seq_q = 0)]
        {
            let given = |missing: bool| {
                let inputs = p.inputs().filter(|spec| !missing || spec.elements > 0);
                inputs.map(|spec| (spec.operand, (spec.dtype, spec.elements))).collect()
            };
            let [all, some]: [OperandMap<_>; 2] = [given(false), given(true)];
            assert!(some.iter().count() < all.iter().count(), "{p:?}");
            for inputs in [all, some] {
                p.check_inputs(&inputs, |&input| input).unwrap();
            }
        }
    }

    #[test]
    fn maps_keep_the_order_of_operands() {
        let mut map: OperandMap<u8> = [(Operand::Sinks, 1), (Operand::Q, 2)].into_iter().collect();
        assert_eq!((map.insert(Operand::V, 3), map.insert(Operand::Q, 4)), (None, Some(2)));
        assert_eq!(
            map.iter().map(|(o, &x)| (o.name(), x)).collect::<Vec<_>>(),
            [("q", 4), ("v", 3), ("sinks", 1)]
        );
        assert_eq!((map.remove(Operand::V), map.get(Operand::V)), (Some(3), None));
    }
}
