// One trajectory, turn by turn: what the model read, what it said, what its tools answered.
// The whole conversation in one document: audit_conversations with { _id: "train/0/task_001/0/1" }.
db.getCollection("audit_turns").aggregate([
  { $match: { record: "train/0/task_001/0/1" } },
  { $sort: { index: 1 } },
]).toArray();
