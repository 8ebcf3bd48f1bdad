// Which trajectories made step 2?
// Set `step`; leave `status` in: undone steps (reverted) keep their number.
db.getCollection("audit_training").aggregate([
  { $match: { status: "committed", step: 2 } },
  { $sort: { trajectory: 1 } },
  { $project: { _id: 0, trajectory: 1, query: 1, answer: 1, final_answer: 1, score: 1, advantage: 1, turns: 1, staleness: 1 } },
]).toArray();
