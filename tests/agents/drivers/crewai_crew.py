"""CrewAI: a crew of one agent with one task."""

import world
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

PROVIDERS = {"chat": "openai", "responses": "openai", "messages": "anthropic"}
options = {"api": "responses"} if world.API == "responses" else {}
llm = LLM(
    model=world.MODEL,
    provider=PROVIDERS[world.API],
    stream=world.STREAMED,
    **options,
)
writer = Agent(
    role="Writer",
    goal="Write down what is in files",
    backstory="You are careful.",
    tools=[tool("look")(world.look), tool("write")(world.write)],
    llm=llm,
)
task = Task(description=world.TASK, expected_output="A sentence.", agent=writer)
print(Crew(agents=[writer], tasks=[task]).kickoff().raw)
